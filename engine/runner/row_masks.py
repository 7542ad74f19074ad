"""Masks of the rows of a step, on the device, of what the host forbids.

Rows that need none may choose anything. All tokens before a row's own must be known when its mask is filled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.grammar.masks import StepMasks
from engine.grammar.spec import GrammarError
from engine.runner.staging import Staging
from engine.sampling.columns import SamplingNeeds
from engine.sampling.host_masks import HostMasks
from engine.sampling.logits_rules import SampledRow
from engine.scheduling.scheduled_batch import ScheduledRequest
from kernels import ops

MasksUnderWay = Callable[[], StepMasks]
"""Masks that are being filled."""


def masked_rows(items: Sequence[ScheduledRequest], needs: SamplingNeeds) -> list[SampledRow]:
    """The rows that wait for masks, as the step was planned: its items move on."""
    return [SampledRow(items[row].request, items[row].start + items[row].num_tokens) for row in needs.masked]


class RowMasks:
    """Of one engine. One thread calls everything."""

    def __init__(self, host: HostMasks, device: torch.device, *, begins_early: bool) -> None:
        """`begins_early`: the tokens that masks depend on are known when a step is launched, and nobody ends meanwhile."""
        self._host = host
        self._begins_early = begins_early
        self._staging = Staging(device)
        self._device = device

    def begin(self, rows: Sequence[SampledRow]) -> MasksUnderWay | None:
        """What the host forbids, filled while the step is computed, where that can begin when it is launched."""
        return self._host.begin(rows) if rows and self._begins_early else None

    def fill(
        self, num_rows: int, masked: Sequence[int], rows: Sequence[SampledRow], begun: MasksUnderWay | None
    ) -> tuple[torch.Tensor, dict[int, GrammarError]]:
        """Masks of the `num_rows` rows of a step: those of `rows` stand at `masked`. And why there are none.

        → [num_rows, ceil(V / 32)] int32, bit b of word w allows token 32 w + b
        """
        live = [index for index, row in enumerate(rows) if not row.request.is_finished]
        filled = self._host.fill([rows[index] for index in live]) if begun is None else begun()
        masks = torch.full((num_rows, filled.rows.shape[1]), -1, dtype=torch.int32, device=self._device)
        if live:
            places = self._staging.send([masked[index] for index in live])
            masks.index_copy_(0, places, ops.send(filled.rows, torch.int32, self._device))
        return masks, {masked[live[index]]: error for index, error in filled.errors.items()}
