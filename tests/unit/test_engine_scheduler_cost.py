"""The cost of a step depends only on its batch; it is counted in bytecode instructions, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import count
from types import FrameType
from typing import Any

import pytest

from engine.scheduling.block_pool import BlockPool
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.scheduled_batch import StepOutput
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.waiting import WaitingQueue
from tests.support.scheduling import make_request

BLOCK_SIZE = 16
STEPS = 24


def num_instructions_of(run: Callable[[], object]) -> int:
    """Bytecode instructions that `run` executes, in all Python functions it calls."""
    num_instructions = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal num_instructions
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        num_instructions += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return num_instructions


class LoadedScheduler:
    """A scheduler with `running` decodes, and `waiting` requests of `tenants` tenants; `cached` other blocks are cached."""

    def __init__(self, *, running: int = 32, waiting: int = 2, tenants: int = 2, cached: int = 16) -> None:
        self._numbers = count()
        self._tenants = tenants
        pool = BlockPool(cached + 4096)
        blocks = pool.allocate(cached)
        for number, block_id in enumerate(blocks):
            pool.register(block_id, number.to_bytes(16, "big"))
        pool.release(blocks)
        limits = SchedulerLimits(max_num_seqs=running, max_num_batched_tokens=1024, max_model_len=32768, block_size=BLOCK_SIZE)
        self.scheduler = Scheduler(limits, pool, clock=lambda: 0.0, prefix_cache=PrefixCache(pool, BLOCK_SIZE))
        for _ in range(running):
            self.add()
        for _ in range(6):
            self.step()
        for _ in range(waiting):
            self.add()
        for _ in range(2 * BLOCK_SIZE):
            self.step()

    def add(self) -> None:
        number = next(self._numbers)
        tenant = f"t{number % self._tenants}"
        self.scheduler.add(make_request(str(number), 20, first_token=number, tenant=tenant, max_tokens=2000))

    def step(self) -> None:
        batch = self.scheduler.schedule()
        self.scheduler.apply(batch, [StepOutput([7]) if item.samples else StepOutput() for item in batch.items])

    def steady(self) -> int:
        return sum(num_instructions_of(self.step) for _ in range(STEPS))

    def turnover(self) -> int:
        """One request ends and one arrives in every step."""
        total = 0
        for _ in range(STEPS):
            self.scheduler.abort(self.scheduler.running[0])
            self.add()
            total += num_instructions_of(self.step)
        return total


@pytest.mark.parametrize(
    "load", [{"waiting": 20_000}, {"tenants": 2_000, "waiting": 4_000}, {"cached": 50_000, "waiting": 64}], ids=str
)
@pytest.mark.parametrize("phase", ["steady", "turnover"])
def test_waiting_requests_tenants_and_cached_blocks_add_no_cost_to_a_step(phase: str, load: dict[str, int]) -> None:
    few, many = getattr(LoadedScheduler(waiting=64), phase)(), getattr(LoadedScheduler(**load), phase)()
    assert many <= 1.15 * few


def test_planning_steady_decodes_touches_only_requests_that_need_a_block() -> None:
    def planned(running: int) -> int:
        loaded = LoadedScheduler(running=running, waiting=0)
        total = 0
        for _ in range(BLOCK_SIZE):
            kept: list[Any] = []
            total += num_instructions_of(lambda kept=kept: kept.append(loaded.scheduler.schedule()))  # type: ignore[misc]
            loaded.scheduler.apply(kept[0], [StepOutput([7])] * len(kept[0].decodes))
        return total

    few, many = planned(32), planned(96)
    per_request = (many - few) / 64 / BLOCK_SIZE
    assert per_request < 9, "instructions per request and step"


def test_a_step_reads_a_bounded_part_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    num_read = 0
    iterate = WaitingQueue.__iter__

    def counting_iter(queue: WaitingQueue) -> Iterator[Any]:
        nonlocal num_read
        for request in iterate(queue):
            num_read += 1
            yield request

    loaded = LoadedScheduler(waiting=5_000, tenants=500)
    monkeypatch.setattr(WaitingQueue, "__iter__", counting_iter)
    loaded.scheduler.abort(loaded.scheduler.running[0])
    loaded.step()
    assert 0 < num_read < 500
