"""Gauges, totals and progress of one engine, read from the scheduler for the gateway. Knows no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from engine.grammar.queue import GrammarQueue
from engine.overlap import Fallbacks
from engine.protocol import EngineStatus, Priority, RequestProgress, TenantProgress
from engine.scheduling.request import Request
from engine.scheduling.scheduled_batch import ScheduledBatch
from engine.scheduling.scheduler import Scheduler


@dataclass(slots=True)
class StepFigures:
    """Figures of the steps so far, and of the last one."""

    steps_total: int = 0
    step_ms: float = 0.0
    num_batched_tokens: int = 0

    def record(self, batch: ScheduledBatch, step_s: float) -> None:
        """Record a step."""
        self.steps_total += 1
        self.num_batched_tokens = batch.num_tokens
        self.step_ms = step_s * 1000


def make_status(
    scheduler: Scheduler,
    grammars: GrammarQueue,
    figures: StepFigures,
    fallbacks: Fallbacks,
    *,
    with_requests: bool,
) -> EngineStatus:
    """The state now; `with_requests` adds every live answer and tenant, at a cost proportional to their number. Answers that
    are parked until their grammar is compiled count as waiting, after all others."""
    pool, totals, host_tier = scheduler.pool, scheduler.totals, scheduler.kv.host_tier
    queue = [*scheduler.waiting(), *grammars.requests()] if with_requests else []
    return EngineStatus(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting + len(grammars),
        kv_blocks_total=pool.num_blocks,
        kv_blocks_used=pool.num_used,
        kv_blocks_cached=pool.num_cached,
        kv_blocks_free=pool.num_free,
        step_ms=figures.step_ms,
        num_batched_tokens=figures.num_batched_tokens,
        steps_total=figures.steps_total,
        prompt_tokens_total=totals.prompt_tokens,
        generation_tokens_total=totals.generation_tokens,
        prefix_cache_hit_tokens_total=totals.prefix_cache_hit_tokens,
        preemptions_total=totals.preemptions,
        requests=_progress(scheduler, queue) if with_requests else None,
        tenants=_tenants(scheduler, queue) if with_requests else None,
        host_blocks_total=host_tier.num_blocks,
        host_blocks_used=host_tier.num_used,
        swapped_in_blocks_total=scheduler.kv.num_swapped_in,
        swapped_out_blocks_total=scheduler.kv.num_swapped_out,
        draft_tokens_total=totals.draft_tokens,
        accepted_draft_tokens_total=totals.accepted_draft_tokens,
        fallback_steps_total=fallbacks.count,
        fallback_reason=fallbacks.reason,
        plain_steps_total={str(reason): count for reason, count in fallbacks.plain_steps.items()},
    )


def _progress(scheduler: Scheduler, queue: Sequence[Request]) -> list[RequestProgress]:
    positions = _positions(queue)
    return [
        RequestProgress(
            request_id=request.request_id,
            state=request.status.value,
            queue_position=positions.get(request),
            kv_blocks=len(request.block_table),
            num_computed_tokens=request.num_computed_tokens,
            num_output_tokens=request.num_output_tokens,
            num_preemptions=request.num_preemptions,
            index=request.index,
        )
        for request in [*scheduler.running, *queue]
    ]


def _positions(queue: Iterable[Request]) -> dict[Request, int]:
    """How many waiting requests of its own tenant and class go before each answer: those are served in order, preempted ones
    first. Between tenants there is no fixed order."""
    lines: dict[tuple[str, Priority], dict[str, int]] = {}
    positions: dict[Request, int] = {}
    for request in sorted(queue, key=lambda request: not request.num_preemptions):
        line = lines.setdefault((request.tenant_id, request.priority), {})
        positions[request] = line.setdefault(request.request_id, len(line))
    return positions


def _tenants(scheduler: Scheduler, queue: Iterable[Request]) -> list[TenantProgress]:
    """The scheduler's tenants, with all waiting answers, also those that are not yet queued in the scheduler."""
    waiting = Counter(request.tenant_id for request in queue)
    known = [replace(tenant, num_waiting=waiting.pop(tenant.tenant_id, 0)) for tenant in scheduler.accounts.progress()]
    return known + [
        TenantProgress(tenant_id=tenant_id, num_running=0, num_waiting=count, kv_blocks=0, service_s=0.0)
        for tenant_id, count in waiting.items()
    ]
