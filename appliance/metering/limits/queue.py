"""Queues of refused requests that wait for room: one FIFO queue per owner of limits. Whether there is room, `attempt` decides.

    refused, but the wait is short enough ─► joins the queue of every refusing owner ─► admitted by all limits at once
                                                                                     └─► timed out: refused

Queues are first come, first served: admission checks leave room for what the waiters ahead need. A request refused by its
tenant or key stays in that queue until it is admitted or gives up, so that nobody behind it uses up this limit while it waits
for another. It is in the queue of a model, which all tenants share, only while the model refuses it: otherwise a tenant waiting
for its own limits would block all others. Places, per queue and in total, are shared between tenants: a tenant that fills them
does not keep others out.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from appliance.base.clock import Clock
from appliance.base.errors import GatehouseError, Refused
from appliance.base.shared_places import has_place
from appliance.metering.limits.admission_request import AdmissionRequest
from appliance.metering.limits.allowances import NOTHING_AHEAD, Ahead, Allowance
from appliance.metering.limits.decisions import WINDOW_KINDS, LimitDecision
from appliance.metering.limits.limit_waits import LimitWait
from appliance.metering.limits.needs import Needs
from appliance.metering.limits.refusals import refusal
from appliance.metering.limits.reservations import Reservation
from appliance.metering.limits.waiter_queue import WaiterQueue

WAITERS_MAX = 1024  # in all queues together
WAITERS_PER_QUEUE_MAX = 256
TRIES_PER_TURN = 32  # per iteration of the event loop: two milliseconds
ROUNDING_S = 0.001  # waits are reported in whole milliseconds, rounded up

_log = structlog.get_logger()


class TimerHandle(Protocol):
    """A scheduled call that can be cancelled, such as `asyncio.TimerHandle`."""

    def cancel(self) -> None:
        """Cancel the call."""
        ...


CallLater = Callable[[float, Callable[[], None]], TimerHandle]


def call_on_loop(delay_s: float, call: Callable[[], None]) -> TimerHandle:
    """Schedule `call` in the running event loop."""
    return asyncio.get_running_loop().call_later(delay_s, call)


class WaitObserver(Protocol):
    """Receives the end of each wait, for metrics."""

    def wait_ended(self, model: str, how: str, waited_s: float) -> None:
        """Handle the end of a request's wait; `how` is admitted, refused, abandoned (the caller was cancelled) or failed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusals:
    """Why `request` with these `needs` was not admitted: the refusing decisions, each with the allowance it comes from.
    `estimate` fills in when running requests will probably make room; it is slow, so it is applied only to what a client
    receives. `day_left_s` is the time in seconds to the next billing day, of which nothing is reserved."""

    request: AdmissionRequest
    needs: Needs
    by: Sequence[tuple[Allowance, LimitDecision]]
    day_left_s: float
    estimate: Callable[[Allowance, LimitDecision], LimitDecision]

    @property
    def decisions(self) -> list[LimitDecision]:
        """Return the decisions without their allowances."""
        return [decision for _allowance, decision in self.by]

    @property
    def error(self) -> Refused:
        """Return the error for the client."""
        decisions = [self.estimate(allowance, decision) for allowance, decision in self.by]
        return refusal(decisions, self.request, self.needs.enforced.expected.tokens)


@dataclass(slots=True, eq=False, kw_only=True)
class Waiter:
    """A waiting request; `queues` are the allowances whose queues it is in."""

    seq: int
    request: AdmissionRequest
    attempt: Callable[[], Reservation | Refusals]
    wait: LimitWait
    deadline_s: float
    outcome: asyncio.Future[Reservation]
    queues: set[Allowance] = field(default_factory=set)
    retry_timer: TimerHandle | None = None
    context: contextvars.Context = field(default_factory=contextvars.copy_context)  # has the request's id, for log lines


class AdmissionQueue:
    """The queues of all owners. Belongs to one event loop; only `wait` awaits anything."""

    def __init__(self, clock: Clock, *, call_later: CallLater = call_on_loop, observer: WaitObserver | None = None) -> None:
        self._clock = clock
        self._call_later = call_later
        self._observer = observer
        self._seq = itertools.count()
        self._queues: dict[Allowance, WaiterQueue[Waiter]] = {}  # without empty ones
        self._waiting: set[Waiter] = set()
        self._to_wake: set[Allowance] = set()  # their waiters are to be tried again
        self._due: deque[Waiter] = deque()  # to be tried next, in order of arrival
        self._is_scheduled = False

    @property
    def waiting(self) -> list[Waiter]:
        """Return the waiting requests."""
        return list(self._waiting)

    def ahead(self, allowance: Allowance, arrival: int | None = None) -> Ahead:
        """Return what the requests that arrived before `arrival` need in this queue; all in the queue for a new one (None)."""
        queue = self._queues.get(allowance)
        return NOTHING_AHEAD if queue is None else queue.ahead(arrival)

    def has_room(self, refusals: Refusals, tenant_id: str) -> bool:
        """Return whether one more request of the tenant may join the queues of the owners that refused it."""
        queues = [self._queues[allowance] for allowance, _decision in refusals.by if allowance in self._queues]
        return _has_place(self._waiting, tenant_id, WAITERS_MAX) and all(
            _has_place(list(queue), tenant_id, WAITERS_PER_QUEUE_MAX) for queue in queues
        )

    async def wait(
        self, refusals: Refusals, attempt: Callable[[], Reservation | Refusals], wait: LimitWait, wait_s: float
    ) -> Reservation:
        """Return the reservation of the refused request as soon as `attempt` succeeds. `wait` receives its place and deadline,
        `wait_s` from now, unless it has them, and how long that took.

        Raises the last refusal at the deadline. A cancelled caller reserves nothing.
        """
        with self._observed(refusals.request.model):
            now_s = self._clock.monotonic_s()
            if wait.arrival is None:
                wait.arrival, wait.deadline_s = next(self._seq), now_s + wait_s
            waiter = Waiter(
                seq=wait.arrival,
                request=refusals.request,
                attempt=attempt,
                wait=wait,
                deadline_s=wait.deadline_s,
                outcome=asyncio.get_running_loop().create_future(),
            )
            is_delivered = False
            try:
                self._waiting.add(waiter)
                waiter.wait.note_attempt(refusals.decisions, now_s)
                self._join_queues(waiter, refusals)
                await asyncio.wait((waiter.outcome,))
                is_delivered = True
                return waiter.outcome.result()
            finally:
                self._discard(waiter, is_delivered=is_delivered)

    @contextmanager
    def _observed(self, model: str) -> Iterator[None]:
        """Report the duration and outcome of a wait to the observer."""
        if self._observer is None:
            yield
            return
        began_s, how = self._clock.monotonic_s(), "failed"
        try:
            yield
            how = "admitted"
        except GatehouseError:
            how = "refused"
            raise
        except asyncio.CancelledError:
            how = "abandoned"
            raise
        finally:
            self._observer.wait_ended(model, how, self._clock.monotonic_s() - began_s)

    def wake(self, allowances: Iterable[Allowance]) -> None:
        """Retry every waiter in these queues, in order of arrival: something was released or a waiter left.

        The attempts run in the next iterations of the event loop, at most TRIES_PER_TURN in each; calls within one iteration
        are combined. New requests cannot overtake meanwhile: their checks leave room for the waiters.
        """
        self._to_wake.update(allowance for allowance in allowances if allowance in self._queues)
        self._schedule_tries()

    def _schedule_tries(self) -> None:
        if (self._to_wake or self._due) and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._try_some)

    def _try_some(self) -> None:
        """Try some of the due waiters. Queues woken meanwhile come after them."""
        self._is_scheduled = False
        if not self._due:
            waiters = {waiter for allowance in self._to_wake for waiter in self._queues.get(allowance, ())}
            self._to_wake.clear()
            self._due.extend(sorted(waiters, key=lambda waiter: waiter.seq))
        try:
            for _ in range(min(TRIES_PER_TURN, len(self._due))):
                waiter = self._due.popleft()
                if waiter in self._waiting:
                    self._to_wake |= self._try(waiter)
        finally:
            self._schedule_tries()

    def _try(self, waiter: Waiter) -> set[Allowance]:
        """Try `waiter` once; return the queues in which others have moved up. An unexpected error ends only this wait."""
        try:
            return self._try_once(waiter)
        except Exception as error:  # noqa: BLE001 - nobody awaits this callback: the waiter gets the error
            return self._fail(waiter, error)

    def _try_once(self, waiter: Waiter) -> set[Allowance]:
        result, now_s = waiter.attempt(), self._clock.monotonic_s()
        if isinstance(result, Reservation):
            waiter.wait.note_attempt((), now_s)
            return self._admit(waiter, result)
        waiter.wait.note_attempt(result.decisions, now_s)
        left_s = waiter.deadline_s - now_s
        if left_s <= 0 or not may_wait(result.decisions, left_s + ROUNDING_S):
            return self._refuse(waiter, result.error)
        return self._join_queues(waiter, result)

    def _admit(self, waiter: Waiter, reservation: Reservation) -> set[Allowance]:
        """End a wait with `reservation` and return the queues that the waiter has left."""
        try:
            left = self._leave(waiter)
            waiter.outcome.set_result(reservation)
        except Exception:
            reservation.void()
            raise
        return left

    def _fail(self, waiter: Waiter, error: Exception) -> set[Allowance]:
        """Log the unexpected error being handled and end a wait with it; return the queues that the waiter has left."""
        request = waiter.request
        waiter.context.run(_log.exception, "admission_failed", model=request.model, key_id=request.key_id)
        return self._refuse(waiter, error)

    def _refuse(self, waiter: Waiter, error: Exception) -> set[Allowance]:
        """End a wait with `error` and return the queues that the waiter has left."""
        if not waiter.outcome.done():
            waiter.outcome.set_exception(error)
        return self._leave(waiter)

    def _join_queues(self, waiter: Waiter, refusals: Refusals) -> set[Allowance]:
        """Join the queue of each refusing owner and schedule a retry; leave and return queues of models that no longer
        refuse."""
        refusing = {allowance for allowance, _decision in refusals.by}
        for allowance in refusing:
            wants_window = any(by is allowance and decision.kind in WINDOW_KINDS for by, decision in refusals.by)
            queue = self._queues.get(allowance, WaiterQueue())
            queue.join(waiter.seq, waiter, refusals.needs.by_allowance[allowance].expected.tokens, wants_window=wants_window)
            self._queues[allowance] = queue
            waiter.queues.add(allowance)
        left = {allowance for allowance in waiter.queues if allowance.owner.scope == "model" and allowance not in refusing}
        for allowance in left:
            self._leave_queue(waiter, allowance)
        left_s = waiter.deadline_s - self._clock.monotonic_s()
        self._schedule_retry(waiter, exact_wait_s(refusals.decisions) or min(left_s, refusals.day_left_s))
        return left

    def _schedule_retry(self, waiter: Waiter, delay_s: float) -> None:
        if waiter.retry_timer is not None:
            waiter.retry_timer.cancel()
        waiter.retry_timer = self._call_later(delay_s, lambda: self.wake(list(waiter.queues)))

    def _leave(self, waiter: Waiter) -> set[Allowance]:
        """Leave every queue and return them."""
        self._waiting.discard(waiter)
        if waiter.retry_timer is not None:
            waiter.retry_timer.cancel()
        left = set(waiter.queues)
        for allowance in left:
            self._leave_queue(waiter, allowance)
        return left

    def _leave_queue(self, waiter: Waiter, allowance: Allowance) -> None:
        queue = self._queues[allowance]
        queue.leave(waiter.seq)
        waiter.queues.discard(allowance)
        if not queue:
            del self._queues[allowance]

    def _discard(self, waiter: Waiter, *, is_delivered: bool) -> None:
        """Remove a waiter that nobody awaits any more, and wake those behind it. An undelivered reservation is voided."""
        left = self._leave(waiter)
        if not is_delivered and waiter.outcome.done() and waiter.outcome.exception() is None:
            waiter.outcome.result().void()
        self.wake(left)


def _has_place(waiters: Collection[Waiter], tenant_id: str, places: int) -> bool:
    return has_place(sum(waiter.request.tenant_id == tenant_id for waiter in waiters), len(waiters), places)


def exact_wait_s(decisions: Iterable[LimitDecision]) -> float:
    """Return the longest exact wait among refusing decisions; 0 when all depend on running requests."""
    return max((decision.wait_s or 0.0 for decision in decisions if not decision.estimated), default=0.0)


def may_wait(decisions: Iterable[LimitDecision], patience_s: float) -> bool:
    """Return whether a refused request could be admitted within `patience_s`; estimated waits are assumed short enough."""
    refused = list(decisions)
    return patience_s > 0 and all(decision.wait_s is not None for decision in refused) and exact_wait_s(refused) <= patience_s
