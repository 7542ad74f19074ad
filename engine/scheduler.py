"""Which tokens of which requests the next step computes, under one token budget and a fixed number of blocks. Knows no torch.

A step is `schedule()` → run → `apply()`. The budget is dealt to decodes first, then to prefills under way, then to waiting
requests. A request gets the blocks of its whole prompt when it is admitted, so only decodes grow; when none is left for an
older one, the youngest running request gives all of its blocks back and is computed again later (recompute preemption).
The oldest running request can therefore always go on, and `schedule()` touches running requests and a bounded number of
waiting ones, never the whole queue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from engine.admission_cost import TokenCosts
from engine.block_pool import BlockPool
from engine.errors import EngineConfigError
from engine.host_tier import HostTier
from engine.prefix_cache import PrefixCache
from engine.protocol import FinishReason, SamplingParams, TokenEvent, TokenLogprob
from engine.request import Request, RequestStatus
from engine.scheduled_batch import ScheduledBatch, ScheduledRequest, StepOutput
from engine.step_budget import StepBudget

LOOKAHEAD_REQUESTS = 8
"""Waiting requests looked at per step behind one that does not fit."""

SKIPS_MAX = 32
"""Younger requests that may pass one that does not fit; then everybody waits for it, so that it cannot starve."""

WATERMARK_DIVISOR = 64
"""One block of so many is kept from admissions while others run: room to grow before somebody must be preempted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds of one engine. Raises `EngineConfigError` for combinations under which a request could never finish."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int

    def __post_init__(self) -> None:
        for option in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size"):
            if getattr(self, option) < 1:
                raise EngineConfigError(option, f"must be at least 1, not {getattr(self, option)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise EngineConfigError(
                "max_num_batched_tokens",
                f"must be at least max_num_seqs ({self.max_num_seqs}), not {self.max_num_batched_tokens}",
            )


@dataclass(slots=True)
class SchedulerTotals:
    """Counters since start. A prompt counts once, when its prefill is first complete, however often it is recomputed."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """Owns every live request. Not thread-safe: one loop calls it."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        *,
        clock: Callable[[], float],
        costs: TokenCosts | None = None,
        prefix_cache: PrefixCache | None = None,
        host_tier: HostTier | None = None,
        step_budget: StepBudget | None = None,
    ) -> None:
        if pool.num_blocks * limits.block_size < limits.max_model_len:
            raise EngineConfigError(
                "max_model_len",
                f"({limits.max_model_len}) does not fit into {pool.num_blocks} KV blocks of {limits.block_size} tokens",
            )
        self.limits = limits
        self.pool = pool
        self.totals = SchedulerTotals()
        self.costs = TokenCosts() if costs is None else costs
        self.host_tier = host_tier
        self._step_budget = step_budget
        self._clock = clock
        self._prefix_cache = prefix_cache
        self._waiting: OrderedDict[Request, None] = OrderedDict()
        self._running: list[Request] = []
        self._watermark_blocks = pool.num_blocks // WATERMARK_DIVISOR

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_requests(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def running(self) -> Sequence[Request]:
        return self._running

    def waiting(self) -> Iterable[Request]:
        return self._waiting

    def add(self, request: Request) -> None:
        """Queue a new request. Its id must be new among the live ones and its length within `max_model_len`."""
        assert request.max_total_tokens <= self.limits.max_model_len, f"request {request.request_id} exceeds the context"
        assert request not in self._waiting, f"request {request.request_id} is queued twice"
        self._waiting[request] = None

    def add_fork(self, request: Request) -> None:
        """Queue a further answer of `request.forked_from`, whose prompt blocks it shares when they are computed."""
        assert request.forked_from is not None, f"request {request.request_id} is no fork"
        self.add(request)

    def expire(self) -> list[TokenEvent]:
        """End the requests that waited for longer than their `queue_deadline_s`."""
        return []

    def abort(self, request: Request) -> TokenEvent | None:
        """End a live request now and free its blocks; None when it has ended before."""
        return None if request.is_finished else self._end(request, FinishReason.ABORTED)

    def fail(self, request: Request, error: str, param: str | None = None) -> TokenEvent:
        """End a live request because its computation failed; `param` names the field that is to blame."""
        return self._end(request, FinishReason.ERROR, error=error, error_param=param)

    def schedule(self) -> ScheduledBatch:
        """Plan one step. An empty batch means that no request is live."""
        batch = ScheduledBatch()
        self._schedule_decodes(batch)
        self._continue_prefills(batch)
        self._admit_waiting(batch)
        assert batch.num_tokens <= self.limits.max_num_batched_tokens, "the token budget was exceeded"
        assert batch.num_tokens or not self.has_requests, "requests are live but none can go on"
        return batch

    def _schedule_decodes(self, batch: ScheduledBatch) -> None:
        index = 0
        while index < len(self._running):
            request = self._running[index]
            index += 1
            if request.status is RequestStatus.DECODE and self._grow_by_one(request):
                batch.add_decode(request)

    def _grow_by_one(self, request: Request) -> bool:
        """Room for one more token of `request`, at the cost of younger ones; False when it was itself the youngest."""
        if request.num_computed_tokens < len(request.block_table) * self.limits.block_size:
            return True
        while not self.pool.num_available:
            victim = self._running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        request.block_table += self.pool.allocate(1)
        return True

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks; it waits first in line and goes on later."""
        self._running.remove(request)
        self._release_blocks(request)
        request.move_to(RequestStatus.QUEUED)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.totals.preemptions += 1
        self._waiting[request] = None
        self._waiting.move_to_end(request, last=False)

    def _continue_prefills(self, batch: ScheduledBatch) -> None:
        for request in self._running:
            if request.status is RequestStatus.PREFILL:
                self._add_chunk(batch, request)

    def _add_chunk(self, batch: ScheduledBatch, request: Request) -> None:
        budget = self.limits.max_num_batched_tokens - batch.num_tokens
        num_tokens = min(budget, request.num_tokens - request.num_computed_tokens)
        if num_tokens:
            batch.add_prefill(request, num_tokens)

    def _admit_waiting(self, batch: ScheduledBatch) -> None:
        while len(self._running) < self.limits.max_num_seqs and batch.num_tokens < self.limits.max_num_batched_tokens:
            request = self._next_waiting()
            if request is None:
                return
            self._admit(request)
            self._add_chunk(batch, request)

    def _next_waiting(self) -> Request | None:
        """The one place that decides who is served next: the oldest that fits, within the bounds on overtaking."""
        passed: list[Request] = []
        for request in islice(self._waiting, LOOKAHEAD_REQUESTS):
            if self._fits(request):
                for overtaken in passed:
                    overtaken.num_skips += 1
                return request
            if request.num_skips >= SKIPS_MAX:
                return None
            passed.append(request)
        return None

    def _fits(self, request: Request) -> bool:
        matched = self._match(request)
        available = self.pool.num_available - sum(1 for block_id in matched if not self.pool.is_used(block_id))
        needed = self._blocks_for(request.num_tokens) - len(matched)
        return needed <= available - (self._watermark_blocks if self._running else 0)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)

    def _match(self, request: Request) -> list[int]:
        return [] if self._prefix_cache is None else self._prefix_cache.match(request)

    def _admit(self, request: Request) -> None:
        del self._waiting[request]
        matched = self._match(request)
        for block_id in matched:
            self.pool.share(block_id)
        request.block_table = matched + self.pool.allocate(self._blocks_for(request.num_tokens) - len(matched))
        request.num_computed_tokens = len(matched) * self.limits.block_size
        self._count_first_schedule(request)
        request.move_to(RequestStatus.PREFILL)
        self._running.append(request)

    def _count_first_schedule(self, request: Request) -> None:
        """A preempted request finds its own blocks again: that is no discount, so only the first match counts."""
        if request.first_scheduled_s is not None:
            return
        request.first_scheduled_s = self._clock()
        request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        request.num_prompt_tokens_computed = request.num_cached_tokens
        self.totals.prefix_cache_hit_tokens += request.num_cached_tokens

    def apply(self, batch: ScheduledBatch, outputs: Sequence[StepOutput]) -> list[TokenEvent]:
        """Take over what a step computed: `outputs[i]` belongs to `batch.items[i]`. Returns the events to send."""
        events = (self._apply_one(item, output) for item, output in zip(batch.items, outputs, strict=True))
        return [event for event in events if event is not None]

    def _apply_one(self, item: ScheduledRequest, output: StepOutput) -> TokenEvent | None:
        request = item.request
        if output.error is not None:
            return self.fail(request, output.error)
        self._advance(request, item)
        if not item.samples:
            return None
        assert len(output.token_ids) == 1, f"request {request.request_id} sampled {len(output.token_ids)} tokens"
        if request.status is RequestStatus.PREFILL:
            request.move_to(RequestStatus.DECODE)
        self.totals.generation_tokens += 1
        reason = request.append(output.token_ids[0])
        if reason is not None:
            return self._end(request, reason, token_ids=output.token_ids, logprobs=output.logprobs)
        return token_event(request, token_ids=output.token_ids, logprobs=output.logprobs)

    def _advance(self, request: Request, item: ScheduledRequest) -> None:
        request.num_computed_tokens = item.start + item.num_tokens
        if request.num_prompt_tokens_computed < request.num_prompt_tokens:
            computed = min(request.num_computed_tokens, request.num_prompt_tokens)
            request.num_prompt_tokens_computed = max(request.num_prompt_tokens_computed, computed)
            if computed == request.num_prompt_tokens:
                self.totals.prompt_tokens += computed
        if self._prefix_cache is not None:
            self._prefix_cache.register(request, item.start)

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        *,
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprob] | None = None,
        error: str | None = None,
        error_param: str | None = None,
    ) -> TokenEvent:
        if request in self._waiting:
            del self._waiting[request]
        else:
            self._running.remove(request)
        self._release_blocks(request)
        request.finish(reason)
        return token_event(request, token_ids=token_ids or [], logprobs=logprobs, error=error, error_param=error_param)

    def _release_blocks(self, request: Request) -> None:
        self.pool.release(request.block_table)
        request.block_table = []

    @contextmanager
    def probe(self) -> Iterator[ScheduledRequest | None]:
        """One greedy token after token 0, in a block lent for the time of the context; None when no block is available."""
        if not self.pool.num_available:
            yield None
            return
        request = Request(
            request_id="probe",
            tenant_id="",
            sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=1),
            token_ids=[0],
            num_prompt_tokens=1,
            max_total_tokens=2,
            stop_ids=frozenset(),
            arrived_s=self._clock(),
            block_table=self.pool.allocate(1),
        )
        try:
            yield ScheduledRequest(request, 0, 1, samples=True)
        finally:
            self._release_blocks(request)

    def live(self) -> Iterator[Request]:
        """Every live request: running ones by age, then waiting ones in the order of the queue."""
        yield from self._running
        yield from self._waiting

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless blocks, requests and limits agree. For tests and for the idle engine."""
        self.pool.check_invariants(request.block_table for request in self.live())
        assert len(self._running) <= self.limits.max_num_seqs, "more requests run than max_num_seqs"
        for request in self._running:
            assert request.status in (RequestStatus.PREFILL, RequestStatus.DECODE), (
                f"{request.request_id} runs while {request.status}"
            )
            slots = len(request.block_table) * self.limits.block_size
            assert request.num_computed_tokens <= slots, f"{request.request_id} computed more tokens than it has slots"
        for request in self._waiting:
            assert request.status is RequestStatus.QUEUED, f"{request.request_id} waits while {request.status}"
            assert not request.block_table, f"{request.request_id} waits and holds blocks"


def token_event(
    request: Request,
    *,
    token_ids: list[int],
    logprobs: list[TokenLogprob] | None = None,
    error: str | None = None,
    error_param: str | None = None,
) -> TokenEvent:
    """The wire form of what just happened to `request`, with its exact counts."""
    return TokenEvent(
        request_id=request.request_id,
        token_ids=token_ids,
        num_output_tokens=request.num_output_tokens,
        num_prompt_tokens_computed=request.num_prompt_tokens_computed,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        queue_s=request.queue_s,
        logprobs=logprobs,
        finish_reason=request.finish_reason,
        error=error,
        index=request.index,
        error_param=error_param,
    )
