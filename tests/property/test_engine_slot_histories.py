"""Random histories of scheduler, overlapped steps and slots together, on a fake device that fails at times: every launched step
reads its requests' blocks, lengths and last tokens from its slots.

`GATEHOUSE_SCRIPTS` sets the number of histories, 20 by default.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Sequence

import pytest

from engine.runner.slots import SlotTable
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.request import UNKNOWN_TOKEN
from engine.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest, StepOutput
from tests.support.launched_fuzz import (
    FakeDevice,
    FakePendingStep,
    LaunchedFuzz,
    run_launched_script,
    run_script_of_many_answers,
)
from tests.support.slots import TokenCounts, slot_state

NUM_HISTORIES = int(os.environ.get("GATEHOUSE_SCRIPTS", "20"))


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


@pytest.mark.parametrize("first", range(0, NUM_HISTORIES, 10))
@pytest.mark.parametrize("run_history", [run_launched_script, run_script_of_many_answers])
def test_slots_hold_what_the_scheduler_plans_after_random_events_and_failures(
    run_history: Callable[..., LaunchedFuzz], first: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL + 1, "gatehouse.engine")
    num_checked = 0
    for seed in range(first, min(first + 10, NUM_HISTORIES)):
        device = run_history(seed, make_device=SlotDevice).device
        assert isinstance(device, SlotDevice)
        assert device.errors == []
        num_checked += device.num_checked
    assert num_checked > 1000
