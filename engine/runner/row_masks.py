"""Masks over the vocabulary for the rows of a step: filled on the host, sent to the device.

A row without one may choose any token. All tokens before a row's own must be known when its mask is filled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from engine.grammar.masks import GrammarMasks, StepMasks
from engine.grammar.spec import GrammarError
from engine.runner.staging import Staging
from engine.sampling.columns import SamplingNeeds
from engine.sampling.host_masks import forbid_tokens
from engine.sampling.logits_rules import ForbiddenTokens, SampledRow
from engine.scheduling.scheduled_batch import ScheduledRequest
from kernels import ops

FillMasks = Callable[[int], tuple[torch.Tensor, dict[int, GrammarError]]]
"""Makes the masks of a step of so many rows: [rows, ceil(V / 32)] int32, bit b of word w allows token 32 w + b; and says why a
row has none, by row."""


class RowMasks:
    """The masks of one engine's steps. One thread calls everything."""

    def __init__(self, grammars: GrammarMasks, device: torch.device, *, fills_at_launch: bool) -> None:
        """`fills_at_launch`: the tokens that masks depend on are known when a step is launched; no request ends meanwhile."""
        self._grammars = grammars
        self._forbidden = ForbiddenTokens()
        self._fills_at_launch = fills_at_launch
        self._staging = Staging(device)
        self._device = device

    def begin(self, items: Sequence[ScheduledRequest], needs: SamplingNeeds) -> FillMasks | None:
        """What makes the masks of a step when the tokens before its rows are known; None if no row waits for a mask.

        `items[i]` is that of row i. With `fills_at_launch` another thread follows the grammars from now on, while the step is
        computed.
        """
        if not needs.masked:
            return None
        rows = [SampledRow(items[row].request, items[row].start + items[row].num_tokens) for row in needs.masked]
        begun = self._begin_grammars(rows) if self._fills_at_launch else None
        return partial(self._fill, needs.masked, rows, begun)

    def _begin_grammars(self, rows: Sequence[SampledRow]) -> Future[StepMasks] | None:
        return self._grammars.fill([row.request for row in rows])

    def _fill(
        self, masked: Sequence[int], rows: Sequence[SampledRow], begun: Future[StepMasks] | None, num_rows: int
    ) -> tuple[torch.Tensor, dict[int, GrammarError]]:
        """`rows` are those of the planned step, because its items advance; `masked` are their indices among `num_rows` rows."""
        live = [index for index, row in enumerate(rows) if not row.request.is_finished]
        live_rows = [rows[index] for index in live]
        grammars = begun if self._fills_at_launch else self._begin_grammars(live_rows)
        filled = self._grammars.nothing_forbidden(len(live)) if grammars is None else grammars.result()
        forbid_tokens(filled.rows, live_rows, self._forbidden)
        masks = torch.full((num_rows, filled.rows.shape[1]), -1, dtype=torch.int32, device=self._device)
        if live:
            row_indices = self._staging.send([masked[index] for index in live])
            masks.index_copy_(0, row_indices, ops.send(filled.rows, torch.int32, self._device))
        return masks, {masked[live[index]]: error for index, error in filled.errors.items()}
