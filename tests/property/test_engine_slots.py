"""Slots while requests arrive, leave, pause and lose their blocks in any order: steps read the scheduler's state."""

from __future__ import annotations

import random
from functools import partial
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.runner.slots import EMPTY_INT64, Int64Array, SlotState, SlotTable, slot_words
from engine.sampling.columns import ColumnSampler
from engine.scheduling.request import UNKNOWN_TOKEN, Request, table_of
from engine.scheduling.scheduled_batch import ScheduledRequest
from tests.support.scheduling import make_request
from tests.support.slots import CPU, slot_state, slot_table

BLOCK, BLOCKS, SEATS, STEPS = 2, 40, 5, 30


class Lives:
    """A scheduler of no rules, and a device that chooses a token for each row of a step."""

    def __init__(self, chance: random.Random, *, is_host: bool) -> None:
        self.chance = chance
        self.state = slot_state(SEATS, BLOCKS)
        if not is_host:
            self.state.words.on_host = None  # as on a GPU
        self.table = slot_table(self.state)
        self.decoding: list[Request] = []  # of the last step
        self.others: list[Request] = []
        self.sampled: dict[Request, int] = {}  # under way
        self.last: list[ScheduledRequest] = []

    def settle(self, requests: list[Request]) -> None:
        for request in requests:
            if request in self.sampled:
                request.token_ids[-1] = self.sampled.pop(request)

    def plan(self) -> tuple[list[ScheduledRequest], list[ScheduledRequest]]:
        """Some of the last step go on, in its order unless something else happens; who comes is settled. Those who decode, and
        others behind them."""
        if self.last and self.chance.random() < 0.3:
            staying = [item.request for item in self.last]
            self.leave([request for request in self.decoding if request not in staying])
            for item in self.last:
                self.make_room(item.request)
                item.start, item.num_tokens = len(item.request.token_ids) - 1, 1
            coming = self.come(staying) if self.chance.random() < 0.5 else []
            self.decoding = staying + coming
            return self.last, [self.item_of(request) for request in coming]
        staying = [request for request in self.decoding if self.chance.random() < 0.8]
        self.leave([request for request in self.decoding if request not in staying])
        planned = staying + self.come(staying)
        if self.chance.random() < 0.1:
            self.chance.shuffle(planned)
        items = [self.item_of(request) for request in planned]
        cut = self.chance.randint(len(items) // 2, len(items))
        self.decoding, self.last = planned, items[:cut]
        return self.last, items[cut:]

    def leave(self, requests: list[Request]) -> None:
        self.settle(requests)
        self.others += requests

    def come(self, staying: list[Request]) -> list[Request]:
        free = SEATS - len(staying)
        coming = self.chance.sample(self.others, self.chance.randint(0, min(free, len(self.others))))
        self.others = [request for request in self.others if request not in coming and self.chance.random() < 0.9]
        if len(coming) < free and (self.chance.random() < 0.5 or not staying + coming):
            coming.append(make_request("new", self.chance.randint(1, 6), max_tokens=BLOCK * BLOCKS))
        return coming

    def item_of(self, request: Request) -> ScheduledRequest:
        is_whole = not request.block_table or (request not in self.sampled and self.chance.random() < 0.1)
        if is_whole:  # it is new, or lost its blocks and is computed again
            request.block_table = table_of()
        self.make_room(request)
        num_tokens = len(request.token_ids)
        return ScheduledRequest(request, 0 if is_whole else num_tokens - 1, num_tokens if is_whole else 1, True)

    def make_room(self, request: Request) -> None:
        while len(request.block_table) * BLOCK < len(request.token_ids):
            request.block_table.append(self.chance.randint(0, 1000))

    def compute(self, items: list[ScheduledRequest], slots: list[int]) -> None:
        """Check what the step reads, and advance its slots as the device does; the tokens of the step before arrive."""
        assert len(set(slots)) == len(slots)
        for item, slot in zip(items, slots, strict=True):
            request, held = item.request, self.sampled.get(item.request)
            tokens, blocks = request.token_ids, [*request.block_table]
            assert int(self.state.num_tokens[slot]) == len(tokens)
            assert int(self.state.last_tokens[slot]) == (tokens[-1] if held is None else held)
            assert self.state.tables[slot, : len(blocks)].tolist() == blocks
        self.settle([item.request for item in items])
        for item, slot in zip(items, slots, strict=True):
            token_id = self.chance.randint(0, 1 << 18)
            self.state.last_tokens[slot], self.state.num_tokens[slot] = token_id, len(item.request.token_ids) + 1
            item.request.token_ids.append(UNKNOWN_TOKEN)
            self.sampled[item.request] = token_id


@pytest.mark.parametrize("is_host", [True, False])
@given(seed=st.integers(0, 2**32))
def test_slots_hold_what_the_scheduler_has(seed: int, *, is_host: bool) -> None:
    lives = Lives(random.Random(seed), is_host=is_host)
    before: tuple[Int64Array, list[Request]] = EMPTY_INT64, []
    for _ in range(STEPS):
        decodes, more = lives.plan()
        items = decodes + more
        if items:
            slots = lives.table.update(decodes, more)
            assert lives.table.positions().tolist() == [len(item.request.token_ids) for item in items]
            if slots is before[0]:
                assert [item.request for item in items] == before[1], "the very list says that nobody came or went"
            lives.compute(items, slots.tolist())
            before = slots, [item.request for item in items]
        doubt = lives.chance.random()
        if doubt < 0.1:
            lives.settle(lives.decoding)
            if doubt < 0.05:
                lives.table.clear()
            else:
                lives.table.invalidate(lives.decoding[:2])


def test_slots_blocks_and_parameters_of_who_comes_are_written_together() -> None:
    make_words = partial(slot_words, num_slots=SEATS, max_blocks=BLOCKS)
    sampler = ColumnSampler(SEATS, 9, CPU, make_words=make_words)
    state = SlotState(sampler.columns.words)
    request = make_request("new", 3)
    request.block_table.extend([7, 4])
    with mock.patch.object(state.words, "write", wraps=state.words.write) as write:
        (slot,) = SlotTable(state, sampler).update([ScheduledRequest(request, 0, 3, True)])
    write.assert_called_once()
    assert (int(state.num_tokens[slot]), state.tables[slot, :2].tolist()) == (3, [7, 4])
    assert int(sampler.columns.streams[slot]) != 0, "what the noise of its seed comes from"
