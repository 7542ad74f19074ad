"""Order of prefills by TTFT target: requests that can meet it go first, late ones are not starved."""

from __future__ import annotations

import pytest

from engine.protocol import Priority, SamplingParams
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.prefill_order import OVERTAKEN_PREFILLS_MAX
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.request import Request
from engine.scheduling.scheduled_batch import ScheduledBatch, StepOutput
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.urgency import AGED_EVERY, AGED_TARGETS, FIRST_TOKEN_TARGET_S

BLOCK_SIZE = 16


class Harness:
    """A scheduler with enough seats and blocks, a manual clock, and requests by name."""

    def __init__(self, *, budget: int = 64, num_blocks: int = 40_000) -> None:
        self.now_s = 0.0
        self.pool = BlockPool(num_blocks)
        limits = SchedulerLimits(
            max_num_seqs=32, max_num_batched_tokens=budget, max_model_len=num_blocks * BLOCK_SIZE, block_size=BLOCK_SIZE
        )
        self.scheduler = Scheduler(
            limits,
            self.pool,
            clock=lambda: self.now_s,
            prefix_cache=PrefixCache(self.pool, BLOCK_SIZE),
        )
        self.num_made = 0

    def add(
        self,
        name: str,
        num_tokens: int,
        *,
        tenant: str = "alice",
        priority: Priority = Priority.STANDARD,
        token: int | None = None,
    ) -> Request:
        self.num_made += 1
        request = Request(
            request_id=name,
            tenant_id=tenant,
            sampling=SamplingParams(seed=0),
            token_ids=[self.num_made if token is None else token] * num_tokens,
            num_prompt_tokens=num_tokens,
            max_total_tokens=num_tokens + 1,
            stop_ids=frozenset(),
            arrived_s=self.now_s,
            priority=priority,
        )
        self.scheduler.add(request)
        return request

    def step(self) -> list[str]:
        """One step; the names of the requests whose prompts got tokens."""
        batch: ScheduledBatch = self.scheduler.schedule()
        self.scheduler.apply(batch, [StepOutput(token_ids=[0] if item.samples else []) for item in batch.items])
        self.scheduler.check_invariants()
        return [item.request.request_id for item in batch.prefills]

    def steps(self, count: int) -> list[str]:
        return [name for _ in range(count) for name in self.step()]


def test_requests_that_can_meet_their_target_keep_the_order_of_arrival() -> None:
    harness = Harness()
    for name, length in (("first", 200), ("second", 50), ("third", 150)):
        harness.add(name, length)
    assert list(dict.fromkeys(harness.steps(7))) == ["first", "second", "third"]


def test_a_request_past_its_target_is_passed_by_those_in_time() -> None:
    harness = Harness()
    harness.add("late", 64)
    harness.now_s = 2 * FIRST_TOKEN_TARGET_S
    harness.add("in time", 64)
    assert harness.steps(2) == ["in time", "late"]


def test_a_prompt_too_long_to_meet_its_target_is_passed_at_once() -> None:
    harness = Harness()
    giant = harness.add("giant", 100_000)
    harness.add("small", 64)
    assert harness.step() == ["small"]
    assert giant.is_late


def test_a_late_prefill_in_progress_is_overtaken_and_resumes() -> None:
    harness = Harness()
    harness.add("giant", 100_000)
    assert harness.steps(3) == ["giant"] * 3
    harness.add("small", 64)
    assert harness.steps(2) == ["small", "giant"]


def test_only_a_few_prefills_in_progress_are_overtaken() -> None:
    harness = Harness()
    for number in range(OVERTAKEN_PREFILLS_MAX + 1):
        harness.add(f"begun {number}", 128, tenant=f"tenant {number}")
        harness.step()
        harness.now_s += 2 * FIRST_TOKEN_TARGET_S  # each has begun in time, and is late now
    harness.add("new", 64, tenant="new")
    begun = [name for name in harness.steps(2 * OVERTAKEN_PREFILLS_MAX + 3) if name != "new"]
    assert len(begun) >= OVERTAKEN_PREFILLS_MAX + 1


def test_a_long_cached_prompt_is_not_late() -> None:
    harness = Harness(budget=20_000)
    harness.add("first", 20_000, token=7)
    harness.steps(2)
    again = harness.add("again", 20_010, token=7)
    harness.add("small", 64)
    harness.step()
    assert not again.is_late


def test_the_batch_class_keeps_the_order_of_arrival() -> None:
    harness = Harness()
    harness.add("first", 256, priority=Priority.BATCH)
    harness.now_s = 50.0
    harness.add("second", 64, priority=Priority.BATCH)
    assert harness.steps(5) == ["first"] * 4 + ["second"]


def test_a_request_that_has_long_been_late_goes_first_in_some_steps() -> None:
    harness = Harness()
    harness.add("late", 640)
    harness.now_s = AGED_TARGETS * FIRST_TOKEN_TARGET_S + 1
    names = []
    for number in range(2 * AGED_EVERY):
        harness.add(f"in time {number}", 64)
        names += harness.step()
    assert names.count("late") == 2


@pytest.mark.parametrize("count", [1, 40, 300])
def test_all_requests_are_served(count: int) -> None:
    harness = Harness(budget=256, num_blocks=4_000)
    requests = [harness.add(str(number), 16 + 37 * (number % 50)) for number in range(count)]
    for _ in range(20 * count):
        harness.now_s += 0.01
        if not harness.scheduler.has_requests:
            break
        harness.step()
    assert all(request.is_finished for request in requests)
