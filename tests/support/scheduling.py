"""A scheduler without a model, and its steps, for unit tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.protocol import Priority, SamplingParams, TokenEvent
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.request import Request
from engine.scheduling.scheduled_batch import ScheduledBatch, StepOutput
from engine.scheduling.scheduler import Scheduler

BLOCK_SIZE = 4


def make_scheduler(
    *,
    num_blocks: int = 16,
    max_num_seqs: int = 4,
    budget: int = 16,
    caches: bool = False,
    host_blocks: int = 0,
    global_prefix: list[int] | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    **options: Any,
) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=num_blocks * BLOCK_SIZE, block_size=BLOCK_SIZE
    )
    pool = BlockPool(num_blocks)
    prefix_cache = PrefixCache(pool, BLOCK_SIZE) if caches else None
    if prefix_cache is not None and global_prefix:
        prefix_cache.share_globally(global_prefix)
    return Scheduler(limits, pool, clock=clock, prefix_cache=prefix_cache, num_host_blocks=host_blocks, **options)


def make_request(
    name: str,
    num_prompt_tokens: int,
    *,
    max_tokens: int = 4,
    tenant: str = "alice",
    first_token: int = 100,
    weight: int = 1,
    priority: Priority = Priority.STANDARD,
    arrived_s: float = 0.0,
    queue_deadline_s: float | None = None,
    index: int = 0,
    forked_from: Request | None = None,
) -> Request:
    return Request(
        request_id=name,
        index=index,
        tenant_id=tenant,
        weight=weight,
        priority=priority,
        sampling=SamplingParams(seed=1),
        token_ids=list(range(first_token, first_token + num_prompt_tokens)),
        num_prompt_tokens=num_prompt_tokens,
        max_total_tokens=num_prompt_tokens + max_tokens,
        stop_ids=frozenset(),
        arrived_s=arrived_s,
        queue_deadline_s=queue_deadline_s,
        forked_from=forked_from,
    )


def apply_outputs(scheduler: Scheduler, batch: ScheduledBatch) -> list[TokenEvent]:
    """Apply a step in which every item that samples gets token 7."""
    events = scheduler.apply(batch, [StepOutput([7]) if item.samples else StepOutput() for item in batch.items])
    scheduler.check_invariants()
    return events


def step(scheduler: Scheduler) -> ScheduledBatch:
    batch = scheduler.schedule()
    apply_outputs(scheduler, batch)
    return batch


def drain(scheduler: Scheduler, steps_max: int = 1000) -> None:
    for _ in range(steps_max):
        if not scheduler.has_requests:
            return
        step(scheduler)
    raise AssertionError("a request starves")


def planned_tokens(batch: ScheduledBatch) -> list[tuple[str, int]]:
    return [(item.request.request_id, item.num_tokens) for item in batch.items]
