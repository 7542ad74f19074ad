"""Masks for tokens that only the host knows to be forbidden: by a grammar, bad words of several tokens, or many end tokens.

They depend on the previous token. Until it is known, a step is computed only up to its logits; it samples once the masks exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
import torch

from engine.grammar.masks import WORD_BITS, GrammarMasks, StepMasks
from engine.sampling.logits_rules import ForbiddenTokens, SampledRow
from engine.scheduling.request import Request
from kernels.ops import SUPPRESSED_IDS_MAX


def needs_masks(request: Request) -> bool:
    """Whether some token of the request has to be chosen with a mask."""
    sampling = request.sampling
    if sampling.is_guided or any(len(word) > 1 for word in sampling.bad_words_token_ids or ()):
        return True
    return sampling.min_tokens > 0 and len(request.stop_ids) > SUPPRESSED_IDS_MAX


class HostMasks:
    """Fills the masks of rows that need them. One thread calls it."""

    def __init__(self, grammars: GrammarMasks) -> None:
        self._grammars = grammars
        self._forbidden = ForbiddenTokens()

    def begin(self, rows: Sequence[SampledRow]) -> Callable[[], StepMasks]:
        """Begin to fill the masks of these rows in another thread; all tokens before theirs are known. Returns a function that
        waits for them: masks, [len(rows), ceil(V / 32)] int32, and for rows without a mask the reason."""
        masks = self._grammars.fill([row.request for row in rows])
        return partial(self._add_forbidden, rows, masks)

    def fill(self, rows: Sequence[SampledRow]) -> StepMasks:
        """As `begin`, but waits for the masks."""
        return self.begin(rows)()

    def _add_forbidden(self, rows: Sequence[SampledRow], masks: Future[StepMasks] | None) -> StepMasks:
        filled = self._grammars.nothing_forbidden(len(rows)) if masks is None else masks.result()
        for index, row in enumerate(rows):
            ids = self._forbidden.of(row)
            if len(ids):
                _forbid(filled.rows[index], ids)
        return filled


def _forbid(mask: torch.Tensor, ids: np.ndarray) -> None:
    """mask: [W] int32, in place; ids: [F] int64"""
    np.bitwise_and.at(mask.numpy().view(np.uint32), ids // WORD_BITS, ~(np.uint32(1) << (ids % WORD_BITS).astype(np.uint32)))
