"""Random lives of requests under a scheduler with tiny pools: nothing leaks, nothing is shared wrongly, everybody ends once."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, precondition, rule

from engine.block_pool import BlockPool
from engine.prefix_cache import PrefixCache
from engine.protocol import FinishReason, SamplingParams, TokenEvent
from engine.request import Request, RequestStatus
from engine.scheduled_batch import ScheduledBatch, StepOutput
from engine.scheduler import Scheduler, SchedulerLimits

END_TOKEN = 0
STEPS_TO_DRAIN_MAX = 3000


class FakeCache:
    """What the blocks hold: (tenant, tokens up to here) of each written slot. Stands in for keys and values."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._slots: dict[int, tuple[str, tuple[int, ...]]] = {}

    def compute(self, batch: ScheduledBatch) -> None:
        """Write the slots of the batch, then check that every request reads its own prefix and nobody else's."""
        for item in batch.items:
            for position in range(item.start, item.start + item.num_tokens):
                self._slots[self._slot(item.request, position)] = self._content(item.request, position)
        for item in batch.items:
            for position in range(item.start + item.num_tokens):
                held = self._slots.get(self._slot(item.request, position))
                assert held == self._content(item.request, position), f"{item.request.request_id} reads foreign content"

    def _slot(self, request: Request, position: int) -> int:
        return request.block_table[position // self._block_size] * self._block_size + position % self._block_size

    def _content(self, request: Request, position: int) -> tuple[str, tuple[int, ...]]:
        return request.tenant_id, tuple(request.token_ids[: position + 1])


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts, fails and steps in any order; invariants hold after each."""

    requests = Bundle("requests")

    @initialize(
        num_blocks=st.integers(3, 12),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 6),
        spare_budget=st.integers(0, 12),
        caches=st.booleans(),
    )
    def build(self, num_blocks: int, block_size: int, max_num_seqs: int, spare_budget: int, caches: bool) -> None:
        self.limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare_budget,
            max_model_len=num_blocks * block_size,
            block_size=block_size,
        )
        pool = BlockPool(num_blocks)
        prefix_cache = PrefixCache(pool, block_size, key=b"test") if caches else None
        self.scheduler = Scheduler(self.limits, pool, clock=lambda: 0.0, prefix_cache=prefix_cache)
        self.cache = FakeCache(block_size)
        self.numbers = random.Random(0)
        self.live: dict[str, Request] = {}
        self.known: dict[str, Request] = {}
        self.ended: dict[str, TokenEvent] = {}
        self.delivered: dict[str, int] = {}
        self.added = 0

    @rule(target=requests, data=st.data(), tenant=st.sampled_from(["alice", "bob"]))
    def add(self, data: st.DataObject, tenant: str) -> str:
        longest = self.limits.max_model_len
        num_prompt_tokens = data.draw(st.integers(1, max(1, longest - 1)))
        max_total_tokens = data.draw(st.integers(min(longest, num_prompt_tokens + 1), longest))
        return self.put(tenant, num_prompt_tokens, max_total_tokens)

    def put(self, tenant: str, num_prompt_tokens: int, max_total_tokens: int) -> str:
        self.added += 1
        request = Request(
            request_id=str(self.added),
            tenant_id=tenant,
            sampling=SamplingParams(seed=1),
            token_ids=[1 + position % 2 for position in range(num_prompt_tokens)],
            num_prompt_tokens=num_prompt_tokens,
            max_total_tokens=max_total_tokens,
            stop_ids=frozenset({END_TOKEN}),
            arrived_s=0.0,
        )
        self.live[request.request_id] = self.known[request.request_id] = request
        self.delivered[request.request_id] = 0
        self.scheduler.add(request)
        return request.request_id

    @rule(request_id=consumes(requests))
    def abort(self, request_id: str) -> None:
        request = self.known[request_id]
        event = self.scheduler.abort(request)
        assert (event is not None) == (request_id in self.live)
        if event is not None:
            assert event.finish_reason is FinishReason.ABORTED
            self.take(event)

    @precondition(lambda self: self.scheduler.has_requests)
    @rule(fails=st.integers(0, 20))
    def step(self, fails: int) -> None:
        batch = self.scheduler.schedule()
        assert 0 < batch.num_tokens <= self.limits.max_num_batched_tokens
        assert batch.num_tokens == sum(item.num_tokens for item in batch.items)
        assert len({item.request.request_id for item in batch.items}) == len(batch.items)
        self.cache.compute(batch)
        outputs = [
            StepOutput(error="broken")
            if fails == 20 and index == 0
            else StepOutput([self.numbers.randrange(0, 8)] if item.samples else [])
            for index, item in enumerate(batch.items)
        ]
        for event in self.scheduler.apply(batch, outputs):
            self.take(event)

    @rule(target=requests)
    def drain(self) -> object:
        """Whatever happened before, everybody comes to an end."""
        for _ in range(STEPS_TO_DRAIN_MAX):
            if not self.scheduler.has_requests:
                break
            self.step(fails=0)
        assert not self.live, f"starved: {sorted(self.live)}"
        assert self.scheduler.pool.num_used == 0
        return multiple()

    def take(self, event: TokenEvent) -> None:
        request = self.live[event.request_id]
        assert event.request_id not in self.ended, "an event after the last one"
        self.delivered[event.request_id] += len(event.token_ids)
        assert event.num_output_tokens == self.delivered[event.request_id]
        if event.finish_reason is not None:
            assert request.status is RequestStatus.FINISHED
            assert request.num_tokens <= request.max_total_tokens
            self.ended[event.request_id] = event
            del self.live[event.request_id]

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_invariants()
        assert {request.request_id for request in self.scheduler.live()} == set(self.live)
        assert len(self.ended) + len(self.live) == self.added
        assert self.scheduler.totals.generation_tokens == sum(self.delivered.values())


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("caches", [False, True])
def test_a_long_random_history_leaves_nothing_behind(caches: bool) -> None:
    numbers = random.Random(11)
    machine = SchedulerMachine()
    machine.build(num_blocks=9, block_size=2, max_num_seqs=4, spare_budget=5, caches=caches)
    for _ in range(4000):
        if len(machine.live) < 12 and numbers.random() < 0.3:
            num_prompt_tokens = numbers.randrange(1, machine.limits.max_model_len)
            max_total_tokens = numbers.randrange(num_prompt_tokens + 1, machine.limits.max_model_len + 1)
            machine.put(numbers.choice(["alice", "bob"]), num_prompt_tokens, max_total_tokens)
        elif machine.live and numbers.random() < 0.02:
            machine.abort(numbers.choice(sorted(machine.live)))
        elif machine.scheduler.has_requests:
            machine.step(fails=numbers.randrange(0, 21))
        machine.everything_adds_up()
    machine.drain()
    assert machine.scheduler.totals.preemptions > 0
    assert (machine.scheduler.totals.prefix_cache_hit_tokens > 0) == caches
