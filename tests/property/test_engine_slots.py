"""Slots while requests start, end, are preempted and reordered at random: steps read the state that the scheduler has."""

from __future__ import annotations

import random
from functools import partial
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.runner.slots import EMPTY_INT64, Int64Array, SlotState, SlotTable, SlotWrites, slot_words
from engine.sampling.columns import ColumnSampler
from engine.scheduling.request import UNKNOWN_TOKEN, Request, table_of
from engine.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest
from tests.support.scheduling import make_request
from tests.support.slots import CPU, TokenCounts, make_batch, slot_state, slot_table

BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS, NUM_STEPS = 2, 40, 5, 30


class SlotFuzz:
    """A scheduler that decides at random, and a device that samples a random token for each row of a step."""

    def __init__(self, rng: random.Random, *, is_host: bool) -> None:
        self.rng = rng
        self.state = slot_state(NUM_SLOTS, NUM_BLOCKS)
        if not is_host:
            self.state.words.on_host = None  # as on a GPU
        self.listener = TokenCounts()
        self.table = SlotTable(self.state, self.listener)
        self.decoding: list[Request] = []  # of the last step
        self.others: list[Request] = []
        self.grown: dict[Request, None] = {}  # got blocks since the last step
        self.sampled: dict[Request, int] = {}  # under way
        self.last: list[ScheduledRequest] = []

    def settle(self, requests: list[Request]) -> None:
        for request in requests:
            if request in self.sampled:
                request.token_ids[-1] = self.sampled.pop(request)

    def plan(self) -> tuple[list[ScheduledRequest], list[ScheduledRequest]]:
        """Plan a step: some requests of the last one, mostly in its order, and some that start. Returns decodes and others."""
        if self.last and self.rng.random() < 0.3:
            staying = [item.request for item in self.last]
            self.end_some([request for request in self.decoding if request not in staying])
            for item in self.last:
                self.extend_blocks(item.request)
                item.start, item.num_tokens = len(item.request.token_ids) - 1, 1
            starting = self.start_some(staying) if self.rng.random() < 0.5 else []
            self.decoding = staying + starting
            return self.last, [self.schedule(request) for request in starting]
        staying = [request for request in self.decoding if self.rng.random() < 0.8]
        self.end_some([request for request in self.decoding if request not in staying])
        planned = staying + self.start_some(staying)
        if self.rng.random() < 0.1:
            self.rng.shuffle(planned)
        items = [self.schedule(request) for request in planned]
        cut = self.rng.randint(len(items) // 2, len(items))
        self.decoding, self.last = planned, items[:cut]
        return self.last, items[cut:]

    def end_some(self, requests: list[Request]) -> None:
        self.settle(requests)
        self.others += requests

    def start_some(self, staying: list[Request]) -> list[Request]:
        free = NUM_SLOTS - len(staying)
        starting = self.rng.sample(self.others, self.rng.randint(0, min(free, len(self.others))))
        self.others = [request for request in self.others if request not in starting and self.rng.random() < 0.9]
        if len(starting) < free and (self.rng.random() < 0.5 or not staying + starting):
            starting.append(make_request("new", self.rng.randint(1, 6), max_tokens=BLOCK_SIZE * NUM_BLOCKS))
        return starting

    def schedule(self, request: Request) -> ScheduledRequest:
        is_whole = not request.block_table or (request not in self.sampled and self.rng.random() < 0.1)
        if is_whole:  # new, or preempted and recomputed
            request.block_table = table_of()
        self.extend_blocks(request)
        num_tokens = len(request.token_ids)
        return ScheduledRequest(request, 0 if is_whole else num_tokens - 1, num_tokens if is_whole else 1, True)

    def extend_blocks(self, request: Request) -> None:
        while len(request.block_table) * BLOCK_SIZE < len(request.token_ids):
            request.block_table.append(self.rng.randint(0, 1000))
            self.grown[request] = None

    def batch(self, decodes: list[ScheduledRequest]) -> ScheduledBatch:
        grown = [item.request for item in decodes if item.request in self.grown]
        self.grown.clear()
        return make_batch(decodes, grown)

    def compute(self, items: list[ScheduledRequest], slots: list[int]) -> None:
        """Check what the step reads, and advance its slots as the device does; the tokens of the step before arrive."""
        assert len(set(slots)) == len(slots)
        for item, slot in zip(items, slots, strict=True):
            request, held = item.request, self.sampled.get(item.request)
            tokens, blocks = request.token_ids, [*request.block_table]
            assert int(self.state.num_tokens[slot]) == len(tokens)
            assert self.listener.held[slot] == (request, len(tokens)), "what a listener keeps is of this request, and all of it"
            self.listener.held[slot] = request, len(tokens) + 1
            assert int(self.state.last_tokens[slot]) == (tokens[-1] if held is None else held)
            assert self.state.tables[slot, : len(blocks)].tolist() == blocks
        self.settle([item.request for item in items])
        for item, slot in zip(items, slots, strict=True):
            token_id = self.rng.choice((0, self.rng.randint(1, 1 << 18)))
            self.state.last_tokens[slot], self.state.num_tokens[slot] = token_id, len(item.request.token_ids) + 1
            item.request.token_ids.append(UNKNOWN_TOKEN)
            self.sampled[item.request] = token_id


@pytest.mark.parametrize("is_host", [True, False])
@given(seed=st.integers(0, 2**32))
def test_slots_hold_the_scheduler_state_in_random_histories(seed: int, *, is_host: bool) -> None:
    fuzz = SlotFuzz(random.Random(seed), is_host=is_host)
    before: tuple[Int64Array, list[Request]] = EMPTY_INT64, []
    for _ in range(NUM_STEPS):
        decodes, more = fuzz.plan()
        items = decodes + more
        if items:
            slots = fuzz.table.update(fuzz.batch(decodes), more)
            assert fuzz.table.positions().tolist() == [len(item.request.token_ids) for item in items]
            if slots is before[0]:
                assert [item.request for item in items] == before[1], "the very list says that nobody came or went"
            fuzz.compute(items, slots.tolist())
            before = slots, [item.request for item in items]
        chance = fuzz.rng.random()
        if chance < 0.1:
            fuzz.settle(fuzz.decoding)
            if chance < 0.05:
                fuzz.table.clear()
            else:
                fuzz.table.invalidate(fuzz.decoding[:2])


def test_a_new_slot_is_written_in_one_call() -> None:
    make_words = partial(slot_words, num_slots=NUM_SLOTS, max_blocks=NUM_BLOCKS)
    sampler = ColumnSampler(NUM_SLOTS, 9, CPU, make_words=make_words)
    state = SlotState(sampler.columns.words)
    request = make_request("new", 3)
    request.block_table.extend([7, 4])
    with mock.patch.object(state.words, "write", wraps=state.words.write) as write:
        (slot,) = SlotTable(state, sampler).update(make_batch([ScheduledRequest(request, 0, 3, True)]))
    write.assert_called_once()
    assert (int(state.num_tokens[slot]), state.tables[slot, :2].tolist()) == (3, [7, 4])
    assert int(sampler.columns.streams[slot]) != 0, "what the noise of its seed comes from"


def make_decodes(count: int) -> list[ScheduledRequest]:
    """Whole prompts of some requests, each with a block."""
    requests = [make_request(f"r{index}", 3) for index in range(count)]
    for request in requests:
        request.block_table.append(7)
    return [ScheduledRequest(request, 0, 3, True) for request in requests]


def test_an_unchanged_step_returns_the_very_array_of_the_last_one() -> None:
    table, items = slot_table(slot_state(NUM_SLOTS, NUM_BLOCKS)), make_decodes(2)
    slots = table.update(make_batch(items))
    for item in items:
        item.request.token_ids.append(UNKNOWN_TOKEN)
        item.start, item.num_tokens = 3, 1
    assert table.update(make_batch(items)) is slots
    assert table.update(make_batch(items[:1])) is not slots


def test_changes_that_the_caller_sends_are_not_written() -> None:
    state, writes = slot_state(NUM_SLOTS, NUM_BLOCKS), SlotWrites()
    with mock.patch.object(state, "write") as write:
        slots = slot_table(state).update(make_batch(make_decodes(2)), unsent=writes)
    write.assert_not_called()
    assert writes.slots == slots.tolist()


def test_an_invalidated_slot_alone_is_sent_again() -> None:
    """A step that was launched and failed may or may not have advanced the slots on the device."""
    state, items = slot_state(NUM_SLOTS, NUM_BLOCKS), make_decodes(2)
    table = slot_table(state)
    slots = table.update(make_batch(items))
    for item in items:
        item.request.token_ids.append(5)
        item.start, item.num_tokens = 3, 1
    state.last_tokens[slots], state.num_tokens[slots] = 9, 9
    table.invalidate([items[0].request, make_request("without a slot", 1)])
    assert table.update(make_batch(items)).tolist() == slots.tolist()
    assert (state.last_tokens[slots].tolist(), state.num_tokens[slots].tolist()) == ([5, 9], [4, 9])
