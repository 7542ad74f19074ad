"""The scheduler: which tokens of which requests the next step computes, under a token budget and a number of blocks. No torch.

A step is `schedule()` → run → `apply()`. Decodes come first, then prefill chunks in the order that the policy gives: running
prefills and waiting requests that can start (`scheduling.admission`), until the step is full. When the predicted use of
blocks was too low and a decode finds none, the policy chooses a request that releases all of its blocks and continues later.

    Scheduler   plans a step: which requests are in it, which make room for others
    Lifecycle   moves a request from one state to the next, and books the move everywhere
    Outcomes    applies what a step computed

The cost of a step depends on what changes in it. A decoding request has one `ScheduledRequest`, its service is charged in
closed form, and a calendar holds the step in which it needs a block. No step iterates over the waiting queue, the tenants or
the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from engine.protocol import FinishReason, SamplingParams, TokenEvent
from engine.scheduling.accounts import Accounts
from engine.scheduling.admission import Admission
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.checks import check_accounts, check_requests
from engine.scheduling.costs import TokenCosts
from engine.scheduling.decode_set import DecodeSet
from engine.scheduling.drafting import Drafter, Drafting
from engine.scheduling.fair_policy import FairPolicy
from engine.scheduling.host_tier import HostTier
from engine.scheduling.in_flight_batch import InFlightBatch
from engine.scheduling.kv_blocks import KvBlocks
from engine.scheduling.lifecycle import Lifecycle
from engine.scheduling.limits import SchedulerLimits, SchedulerTotals
from engine.scheduling.outcomes import Outcomes
from engine.scheduling.policy import Policy, PolicyContext, Start
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.request import Request, RequestStatus, table_of
from engine.scheduling.scheduled_batch import RowResult, ScheduledBatch, ScheduledRequest, StepOutput
from engine.scheduling.step_budget import StepBudget
from engine.scheduling.tenant_rotation import TenantRotation
from engine.scheduling.token_events import StepEvents

SPARE_PER_EARLY_BLOCK = 8
"""Spare blocks required for each block given before it is needed, so that no request waits longer for blocks because of it."""


class Scheduler:
    """Plans the steps of one engine. Not thread-safe: one loop calls it."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        *,
        clock: Callable[[], float],
        costs: TokenCosts | None = None,
        prefix_cache: PrefixCache | None = None,
        num_host_blocks: int = 0,
        step_budget: StepBudget | None = None,
        drafter: Drafter | None = None,
        policy: Callable[[PolicyContext], Policy] = FairPolicy,
    ) -> None:
        """Without a `prefix_cache` nothing is shared, but preempted requests still find their own blocks again.
        `num_host_blocks`: the size of the host tier."""
        limits.check_blocks(pool.num_blocks)
        self.limits = limits
        self.pool = pool
        self.costs = TokenCosts() if costs is None else costs
        self.totals = SchedulerTotals()
        self.accounts = Accounts(self.costs)
        prefix_cache = prefix_cache or PrefixCache(pool, limits.block_size, is_shared=False)
        self.kv = KvBlocks(pool, costs=self.costs, prefix_cache=prefix_cache, host_tier=HostTier(num_host_blocks))
        self.policy = policy(PolicyContext(self.accounts, self.kv, limits.max_num_seqs, clock))
        self.step_budget = step_budget
        self.admission = Admission(self.accounts, self.kv, max_num_seqs=limits.max_num_seqs, step_budget=step_budget)
        self._rotation = TenantRotation(self.accounts, self.kv, clock)
        self._decodes = DecodeSet(self.accounts, limits.block_size)
        self._lifecycle = Lifecycle(
            self.accounts, self.admission, self.policy, self._decodes, self._rotation, self.totals, clock
        )
        self._drafting: Drafting | None = None
        if drafter is not None:
            self._drafting = Drafting(drafter, self.accounts, self.kv, self._decodes, self.totals, self._lifecycle.charge)
        self._outcomes = Outcomes(self._lifecycle, self.kv, self.admission, self._drafting, self.totals)
        self._planned: ScheduledBatch | None = None  # neither applied nor advanced yet

    @property
    def num_waiting(self) -> int:
        return self._lifecycle.num_waiting

    @property
    def num_running(self) -> int:
        return len(self.accounts.running_requests)

    @property
    def has_requests(self) -> bool:
        return bool(self.accounts.running_requests or self._lifecycle.num_waiting)

    @property
    def running(self) -> list[Request]:
        return list(self.accounts.running_requests)  # by age

    def waiting(self) -> Iterator[Request]:
        """Queued requests by arrival or preemption, then those that wait for a prompt to share."""
        return self._lifecycle.waiting()

    def live(self) -> Iterator[Request]:
        yield from self.accounts.running_requests
        yield from self.waiting()

    def add(self, request: Request) -> None:
        """Queue a new request. Its length must be within `max_model_len`. A further answer of `request.forked_from` shares that
        request's prompt blocks once they are computed."""
        assert request.max_total_tokens <= self.limits.max_model_len, f"request {request.request_id} exceeds the context"
        self._lifecycle.add(request)

    def preempt(self, request: Request) -> None:
        """Release a running request's blocks; it waits before its tenant's new requests and continues later."""
        self._lifecycle.preempt(request)

    def abort(self, request: Request) -> TokenEvent | None:
        """End a live request now and free its blocks. None if it has ended already."""
        return None if request.is_finished else self._lifecycle.end(request, FinishReason.ABORTED)

    def expire(self) -> list[TokenEvent]:
        """End the requests that were not scheduled before their `queue_deadline_s`."""
        return self._lifecycle.expire()

    def should_settle_first(self) -> bool:
        """Called before `schedule` while a step is in flight: whether to settle it first, because drafting needs its tokens."""
        return self._drafting is not None and self._drafting.should_settle_first()

    def schedule(self) -> ScheduledBatch:
        """Plan one step. An empty batch means that no request is live, or that all of them wait for a step in flight."""
        batch = self._plan()
        if not batch.num_tokens and self.has_requests and not self._outcomes.num_in_flight:
            batch = self._plan()  # the request that room was made for was passed over: now it can start
        batch.moves = self.kv.pop_moves()
        assert batch.num_tokens <= self.limits.max_num_batched_tokens, "the token budget was exceeded"
        self._planned = batch
        can_go_on = batch.num_tokens or self._outcomes.num_in_flight
        assert can_go_on or not self.has_requests, "requests are live but none can go on"
        return batch

    def _plan(self) -> ScheduledBatch:
        self.admission.begin_step()
        self.policy.begin_step()
        self._pause_and_resume()
        self._make_room()
        self._rotation.exchange(self._lifecycle.preempt)
        grown = self._grow_decodes()
        self.accounts.step += 1
        batch = self._decodes.batch(grown)
        if self._drafting is not None and not self._outcomes.num_in_flight:
            spare_tokens = self.limits.max_num_batched_tokens - batch.num_tokens
            self._drafting.plan(
                batch, spare_tokens // 2 if self._lifecycle.has_queued or self.accounts.prefilling else spare_tokens
            )
        self._schedule_prefills(batch)
        return batch

    def _pause_and_resume(self) -> None:
        pause, resume = self.policy.pause_changes()
        for account in pause:
            self._decodes.pause(account)
        for account in resume:
            self._decodes.resume(account)
            self.policy.on_charged(account)  # it decodes again: check anew when it may be ahead

    def _make_room(self) -> None:
        """Preempt as many requests as needed for the first waiting request that is entitled to more than it has."""
        applicants = self.policy.applicants()
        for applicant in applicants:
            while self.admission.can_start(applicant) is Start.NO_ROOM:
                victim = self.policy.victim(applicant)
                if victim is None:
                    break
                self._lifecycle.preempt(victim)
            else:
                return
        if applicants:
            self.policy.on_no_victim()

    def _grow_decodes(self) -> list[Request]:
        """Allocate a block for each decode that needs one, if necessary by preempting the request that the policy names.
        Returns the decodes that got one."""
        full = self._decodes.pop_due()
        while len(full) > self.kv.num_spare:
            self._lifecycle.preempt(self.policy.growth_victim(self.accounts.running_requests))
            full = [request for request in full if request in self._decodes.items]
        full += self._decodes.pop_due_soon((self.kv.num_spare - len(full)) // SPARE_PER_EARLY_BLOCK)
        self.kv.grow(full)
        self._decodes.schedule_next_growth(full)
        return full

    def _schedule_prefills(self, batch: ScheduledBatch) -> None:
        if not self.accounts.prefilling and not (self._lifecycle.has_queued and self.admission.has_seat):
            return
        if self.step_budget is not None:
            self.step_budget.begin_step(len(batch.decodes), self.accounts.aggregate.context_at(self.accounts.step))
        for returning in self._rotation.first_prefills(self.admission.can_return):
            if not self._add_chunk(batch, returning):
                return
        while batch.num_tokens < self.limits.max_num_batched_tokens:
            can_start = self.admission.can_start if self.admission.has_seat else None
            request = self.policy.next_prefill(can_start)
            if request is None or not self._add_chunk(batch, request):
                return

    def _add_chunk(self, batch: ScheduledBatch, request: Request) -> bool:
        """Compute the next part of a prompt; False when the step is full."""
        start = self.admission.first_position(request)
        num_tokens = min(self.limits.max_num_batched_tokens - batch.num_tokens, request.num_tokens - start)
        if self.step_budget is not None:
            num_tokens = self.step_budget.chunk(start, num_tokens)
        if not num_tokens:
            return False
        if request.status is RequestStatus.QUEUED:
            self._lifecycle.start(request)
        self.kv.extend(request, start + num_tokens)
        batch.add_prefill(request, num_tokens)
        request.scheduled_step = self.accounts.step
        self.admission.note_next_block(request)
        self._lifecycle.charge(request, self.costs.prefill_ps(start, num_tokens))
        return True

    def apply(self, batch: ScheduledBatch, outputs: Sequence[StepOutput]) -> list[TokenEvent]:
        """Apply what a step computed: `outputs[i]` belongs to `batch.items[i]`. Returns the events to send."""
        self._planned = None
        return self._outcomes.apply(batch, outputs)

    def advance(self, batch: ScheduledBatch) -> InFlightBatch:
        """Book a launched step that has no results yet as done, so that the next one can be planned. `settle` follows, in the
        order of the steps. At most two steps are in flight at a time, and one while a step is planned."""
        self._planned = None
        return self._outcomes.advance(batch)

    def settle(self, in_flight: InFlightBatch, outputs: Sequence[RowResult]) -> StepEvents:
        """Apply what a step in flight computed. `outputs[i]` belongs to row i; None for a row that was not computed because its
        request lost its blocks, and that will be computed again. Returns what to send."""
        return self._outcomes.settle(in_flight, outputs)

    def abandon_steps(self) -> None:
        """Forget steps that are planned or launched: none will be applied or settled. The caller must abort every request
        now."""
        for item in () if self._planned is None else self._planned.decodes:
            item.request.num_computed_tokens += 1  # that token was booked when the step was planned
        self._planned = None
        self._outcomes.num_in_flight = 0

    @contextmanager
    def probe(self) -> Iterator[ScheduledRequest | None]:
        """One greedy token after token 0, in a block lent while the context is open; None when no block is available."""
        if not self.kv.num_spare:
            yield None
            return
        block_id = self.pool.allocate_scratch()
        try:
            yield _probe_item(block_id)
        finally:
            self.pool.release([block_id])

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless blocks, requests, accounts and limits agree. Visits every request, block and account:
        for tests and for the idle engine."""
        running, waiting = self.running, list(self.waiting())
        check_requests(running, waiting, self.limits)
        self.kv.check_invariants([*running, *waiting])
        self.admission.check_invariants()
        self._decodes.check_invariants()
        check_accounts(self.accounts)


def _probe_item(block_id: int) -> ScheduledRequest:
    """The greedy token after token 0, computed in the given block: a harmless one, which tells a broken device from bad
    requests."""
    request = Request(
        request_id="probe",
        tenant_id="",
        sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=1),
        token_ids=[0],
        num_prompt_tokens=1,
        max_total_tokens=2,
        stop_ids=frozenset(),
        arrived_s=0.0,
        block_table=table_of([block_id]),
    )
    return ScheduledRequest(request, 0, 1, samples=True)
