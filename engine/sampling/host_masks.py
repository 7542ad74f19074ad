"""Tokens that only the host knows to be forbidden, in masks: by a grammar, bad words of several tokens, or many end tokens.

They depend on the previous token. Until it is known, a step is computed only up to its logits; it samples once the masks exist
(`runner.row_masks`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.grammar.masks import WORD_BITS
from engine.sampling.logits_rules import ForbiddenTokens, SampledRow
from engine.scheduling.request import Request
from kernels.ops import SUPPRESSED_IDS_MAX


def needs_masks(request: Request) -> bool:
    """Whether some token of the request has to be chosen with a mask."""
    sampling = request.sampling
    if sampling.is_guided or any(len(word) > 1 for word in sampling.bad_words_token_ids or ()):
        return True
    return sampling.min_tokens > 0 and len(request.stop_ids) > SUPPRESSED_IDS_MAX


def forbid_tokens(masks: torch.Tensor, rows: Sequence[SampledRow], forbidden: ForbiddenTokens) -> None:
    """Forbid what is forbidden besides the grammars. masks: [len(rows), ceil(V / 32)] int32, in place; all tokens before those
    of the rows are known."""
    words = masks.numpy().view(np.uint32)
    for index, row in enumerate(rows):
        ids = forbidden.of(row)
        if len(ids):
            np.bitwise_and.at(words[index], ids // WORD_BITS, ~(np.uint32(1) << (ids % WORD_BITS).astype(np.uint32)))
