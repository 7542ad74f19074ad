"""The fake device of random histories with the slots of a real one: each launched step checks what its slots hold."""

from __future__ import annotations

import random
from collections.abc import Sequence

from engine.runner.slots import SlotTable
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.request import UNKNOWN_TOKEN
from engine.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest, StepOutput
from tests.support.launched_fuzz import FakeDevice, FakePendingStep
from tests.support.slots import TokenCounts, slot_state


class SlotDevice(FakeDevice):
    """Keeps a `SlotTable` as `SlotRunner` does. `errors`: what was wrong with slots, which a caller of `launch` takes for a
    failed step. `num_checked`: rows of launched steps."""

    def __init__(self, limits: SchedulerLimits, rng: random.Random, *, is_synchronous: bool, fault_rate: float) -> None:
        super().__init__(limits, rng, is_synchronous=is_synchronous, fault_rate=fault_rate)
        self._state = slot_state(limits.max_num_seqs, limits.max_blocks)
        self._counts = TokenCounts()
        self._table = SlotTable(self._state, self._counts)
        self.errors: list[Exception] = []
        self.num_checked = 0

    def run(self, items: Sequence[ScheduledRequest]) -> list[StepOutput]:
        self._table.invalidate([item.request for item in items])
        return super().run(items)

    def invalidate_slots(self) -> None:
        self._table.clear()
        super().invalidate_slots()

    def launch(self, batch: ScheduledBatch) -> FakePendingStep:
        ending = [item for item in batch.prefills if item.samples]
        items = batch.decodes + ending
        try:
            slots = self._update(batch, ending)
            for item, slot in zip(items, slots, strict=True):
                self._check(item, slot)
        except Exception as error:
            self.errors.append(error)
            raise
        pending = super().launch(batch)
        for item, slot in zip(items, slots, strict=True):
            self._advance(item, slot)
        return pending

    def _update(self, batch: ScheduledBatch, ending: list[ScheduledRequest]) -> list[int]:
        items = batch.decodes + ending
        if batch.num_draft_tokens:
            slots = self._table.update_for_verification(items)
        else:
            slots = self._table.update(batch, ending).tolist()
            assert self._table.positions().tolist() == [item.start + item.num_tokens for item in items]
        assert len(set(slots)) == len(items), "each request has a slot of its own"
        return slots

    def _check(self, item: ScheduledRequest, slot: int) -> None:
        """Check what the step reads."""
        request, num_tokens = item.request, item.start + item.num_tokens - item.num_draft_tokens
        table = request.block_table
        assert self._state.tables[slot, : len(table)].tolist() == [*table], "the blocks of this request"
        self.num_checked += 1
        if item.num_draft_tokens:
            return  # the host sends the tokens
        last_token = request.token_ids[num_tokens - 1]
        if last_token == UNKNOWN_TOKEN:
            last_token = self._last_tokens[request]
        assert int(self._state.num_tokens[slot]) == num_tokens
        assert int(self._state.last_tokens[slot]) == last_token
        assert self._counts.held[slot] == (request, num_tokens), "what the sampler keeps is of this request, and all of it"

    def _advance(self, item: ScheduledRequest, slot: int) -> None:
        self._state.last_tokens[slot] = self._last_tokens[item.request]
        self._state.num_tokens[slot] += 1
        request, num_tokens = self._counts.held[slot]
        self._counts.held[slot] = request, num_tokens + 1
