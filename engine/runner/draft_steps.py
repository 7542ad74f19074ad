"""A draft model over slots: one small decode step for each draft token, none of which passes through the host.

    slots ─► small step ─► draft 1 ─► slots ─► small step ─► draft 2 ─► …      verification step: last token │ 1 │ 2 │ …

A draft token is drawn from the small model's logits as the token will be from the large one's, by the same rules and with the
noise of the same position, so that both draw the same token wherever their distributions agree. The small steps advance the
slots as decodes do; the host sends these slots again when it knows how many drafts were accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.runner.decode_input_buffers import DecodeInputBuffers
from engine.runner.decode_step import DecodeSteps
from engine.runner.staging import Staging
from engine.sampling.columns import ColumnSampler, SamplingNeeds
from engine.speculation.options import SPECULATIVE_TOKENS_MAX


class DraftSteps:
    """Drafts tokens for requests in slots."""

    def __init__(self, decodes: DecodeSteps, inputs: DecodeInputBuffers, sampler: ColumnSampler) -> None:
        self.decodes = decodes
        self._inputs = inputs
        self._sampler = sampler
        device = inputs.slots.device
        self._staging = Staging(device)
        self._draft_tokens = torch.zeros(SPECULATIVE_TOKENS_MAX, inputs.max_rows, dtype=torch.int64, device=device)

    def propose(self, slots: Sequence[int], depths: Sequence[int]) -> torch.Tensor:
        """`depths[i]` ≥ 1 draft tokens for the request in `slots[i]`, which is current → [Σ depths] int64, request by request;
        where nothing can be drawn, token 0."""
        order = sorted(range(len(slots)), key=lambda i: -depths[i])
        active_slots = [slots[i] for i in order]
        for depth in range(depths[order[0]]):
            while depths[order[len(active_slots) - 1]] <= depth:
                active_slots = active_slots[:-1]  # a new list: `write_slots` takes the same list for the same slots
            self._step(active_slots)
            self._draft_tokens[depth, : len(active_slots)].copy_(self.decodes.step.sampled[: len(active_slots)])
        column = {index: column_index for column_index, index in enumerate(order)}
        width = self._draft_tokens.shape[1]
        indices = [depth * width + column[index] for index, number in enumerate(depths) for depth in range(number)]
        return self._draft_tokens.view(-1).index_select(0, self._staging.send(indices)).clamp_min(0)

    def _step(self, slots: Sequence[int]) -> None:
        """One more token in each of these slots. Draft tokens need no scores, and what a mask forbids is not accepted."""
        needs = SamplingNeeds(self._sampler.needs(slots).kind._replace(num_top=0), [], [])
        shape = self.decodes.select_shape(len(slots), needs)
        self._inputs.write_slots(slots, shape.size)
        self.decodes.run(shape)
        if shape.kind is None:
            self.decodes.step.sample(shape.size, needs.kind)
