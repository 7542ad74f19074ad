"""The life cycle of requests: every state transition, with its bookkeeping. Knows no torch.

    add ──────────────► queued ──start──► prefill ──start_decoding──► decode
      └► parked ─release─┘ ▲                 │                          │
                           └─────preempt─────┴──────────────────────────┤
    wherever it is ──────────────────────end────────────────────────────┴──► finished

The scheduler decides which request moves, `scheduling.outcomes` what a step's results do to it; only this class books the move.
A fork is parked until the prompt that it shares is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from engine.protocol import FinishReason, TokenEvent
from engine.scheduling.accounts import Accounts, account_of
from engine.scheduling.admission import Admission
from engine.scheduling.decode_set import DecodeSet
from engine.scheduling.limits import SchedulerTotals
from engine.scheduling.policy import Policy
from engine.scheduling.request import Request, RequestStatus
from engine.scheduling.tenant_rotation import TenantRotation
from engine.scheduling.token_events import token_event
from engine.scheduling.waiting import Deadlines, ParkedForks


class Lifecycle:
    """Owns every live request. After each call the queue, accounts, seats, blocks and policy agree about it."""

    def __init__(
        self,
        accounts: Accounts,
        admission: Admission,
        policy: Policy,
        decodes: DecodeSet,
        rotation: TenantRotation,
        totals: SchedulerTotals,
        clock: Callable[[], float],
    ) -> None:
        self._accounts = accounts
        self._admission = admission
        self._policy = policy
        self._decodes = decodes
        self._rotation = rotation
        self._totals = totals
        self._clock = clock
        self._deadlines = Deadlines()
        self._forks = ParkedForks()
        self._queued: dict[Request, None] = {}  # by arrival or preemption; the policy decides which goes first

    @property
    def num_waiting(self) -> int:
        return len(self._queued) + len(self._forks)

    @property
    def has_queued(self) -> bool:
        """Whether a request waits for a seat, and not only for a prompt to share."""
        return bool(self._queued)

    def waiting(self) -> Iterator[Request]:
        yield from self._queued
        yield from self._forks

    def add(self, request: Request) -> None:
        """Queue a new request, or park a fork until its prompt is computed. Its tenant has the request's weight from now on."""
        assert request not in self._queued, f"request {request.request_id} is queued twice"
        if request.forked_from is None:
            self._deadlines.add(request)
        request.account = account = self._accounts.find(request.tenant_id, request.priority, request.weight)
        if request.weight != account.weight:
            self._policy.set_weight(account, request.weight)
        if not self._forks.park(request):
            self._enqueue(request)

    def record_first_token(self, parent: Request) -> None:
        """Record that a prompt has its first token, and queue its forks before other requests of their tenant."""
        if parent.first_token_s is None:
            parent.first_token_s = self._clock()
        for fork in reversed(self._forks.pop(parent)):
            self._enqueue(fork, first=True)

    def _enqueue(self, request: Request, *, first: bool = False) -> None:
        self._queued[request] = None
        self._accounts.add_waiting(request, first=first)
        self._policy.on_queued(request)

    def start(self, request: Request) -> None:
        """Give a waiting request a seat and blocks; `Admission.can_start` or `can_return` must have admitted it just before."""
        del self._queued[request]
        num_swapped_in = self._admission.start(request)
        if num_swapped_in:
            self.charge(request, num_swapped_in * self._accounts.costs.swap_in_block_ps)
        self._accounts.start_running(request)
        self._policy.on_dequeued(request)
        self._policy.on_started(request)
        self._rotation.on_started(request)
        request.copy_shared_token_ids()
        request.move_to(RequestStatus.PREFILL)
        request.moved_step = self._accounts.step
        num_lost = request.num_lost_tokens - request.num_computed_tokens
        if num_lost > 0:
            self._totals.recomputed_tokens += num_lost
            self._policy.on_recompute(request, num_lost)
        if request.first_scheduled_s is None:
            request.record_first_schedule(self._clock())
            if request.forked_from is None:
                self._totals.prefix_cache_hit_tokens += request.num_cached_tokens

    def start_decoding(self, request: Request) -> None:
        """Move a request whose whole prompt is computed to decoding."""
        account = account_of(request)
        self._admission.finish_prefill(request)
        request.move_to(RequestStatus.DECODE)
        self._accounts.finish_prefill(request)
        self._decodes.add(request)
        self._policy.on_backlog_change(account)
        self._policy.on_charged(account)

    def stop_decoding(self, request: Request) -> None:
        """Plan no further steps with a request whose last token is in flight. It keeps its seat until that token is known."""
        self._decodes.remove(request)

    def preempt(self, request: Request) -> None:
        """Release a running request's blocks; it waits before its tenant's new requests and continues later."""
        request.num_lost_tokens = request.num_computed_tokens
        request.num_preemptions += 1
        request.moved_step = self._accounts.step
        self._totals.preemptions += 1
        self._rotation.on_preempted(request)
        self._enqueue(request)
        self._stop(request, is_preempted=True)
        request.move_to(RequestStatus.QUEUED)
        request.num_computed_tokens = request.num_in_flight_tokens = 0

    def _stop(self, request: Request, *, is_preempted: bool = False, is_failed: bool = False) -> None:
        """Release the seat and the blocks of a running request."""
        self._decodes.remove(request)
        self._admission.stop(request, is_preempted=is_preempted, is_failed=is_failed)
        self._accounts.stop_running(request)
        self._policy.on_backlog_change(account_of(request))

    def end(self, request: Request, reason: FinishReason, token_ids: list[int] | None = None) -> TokenEvent:
        """End a live request. Returns its last event, with these tokens. Forks that wait for its prompt compute it
        themselves."""
        account = account_of(request)
        if request in self._queued:
            del self._queued[request]
            self._accounts.remove_waiting(request)
            self._policy.on_dequeued(request)
        elif not self._forks.remove(request):
            self._stop(request, is_failed=reason is FinishReason.ERROR)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            account.record_output(request.num_output_tokens)
        request.finish(reason)
        for fork in self._forks.pop(request):
            self._enqueue(fork)
        event = token_event(request, token_ids or [])
        if token_ids and request.first_token_s is not None:
            event.decode_s = self._clock() - request.first_token_s
        return event

    def fail(self, request: Request, error: str, param: str | None = None) -> TokenEvent:
        """End a live request because its computation failed; `param` names the field that is to blame."""
        event = self.end(request, FinishReason.ERROR)
        event.error, event.error_param = error, param
        return event

    def expire(self) -> list[TokenEvent]:
        """End the requests not scheduled before their `queue_deadline_s`, and the forks that wait for their prompts."""
        expired = self._deadlines.expired(self._clock())
        return [
            self.end(answer, FinishReason.DEADLINE) for request in expired for answer in (*self._forks.of(request), request)
        ]

    def charge(self, request: Request, cost_ps: int) -> None:
        """Charge the tenant of a request for more than its decodes."""
        self._accounts.charge(account_of(request), cost_ps)
        self._policy.on_charged(account_of(request))
