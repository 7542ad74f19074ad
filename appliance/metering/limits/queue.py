"""Requests that wait a moment for room instead of being refused. Knows lines and time; what room is, `attempt` decides.

    ask ─► refused, but room comes in time ─► in the line of every owner that refused it ─► admitted, all limits at once
                                                 │                                     └─► its patience is over: refused
                                                 └─ everybody behind it leaves room for what those before it need

A line is first come, first served: nobody takes what a waiter ahead of it needs. A request that its tenant or key refused
stays in that line until it is admitted or gives up, so that nobody behind it uses up this limit while it waits for another. In
the line of a model, which all tenants share, it stands only while the model refuses it: otherwise a tenant that waits for
its own limits would block all others. The places in a line, and those of all lines together, are shared: a tenant that fills
them keeps no other out.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from appliance.metering.limits.line import Line
from appliance.metering.limits.refusals import refusal
from appliance.metering.limits.reservations import Reservation

WAITING_MAX = 1024  # places of all lines together
LINE_MAX = 256
TRIES_PER_TURN = 32  # in a turn of the event loop: two milliseconds
ROUNDING_S = 0.001  # waits are told in whole milliseconds, rounded up

_log = structlog.get_logger()


class Alarm(Protocol):
    """A scheduled call."""

    def cancel(self) -> None:
        """Do not make it."""
        ...


Later = Callable[[float, Callable[[], None]], Alarm]


def on_the_loop(delay_s: float, call: Callable[[], None]) -> Alarm:
    """Schedule `call` in the running event loop."""
    return asyncio.get_running_loop().call_later(delay_s, call)


class WaitObserver(Protocol):
    """Who counts the waits: `how` they end is admitted, refused, abandoned (its caller was cancelled) or failed."""

    def wait_began(self, model: str) -> None:
        """Hear that a request waits for room."""
        ...

    def wait_ended(self, model: str, how: str, waited_s: float) -> None:
        """Hear that it does not any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusals:
    """Why a request was not admitted: each refusing decision, with whose limit it is. `estimate` adds when running requests
    will probably make room; it is slow, so only what a client is told goes through it."""

    by: Sequence[tuple[Allowance, LimitDecision]]
    estimate: Callable[[Allowance, LimitDecision], LimitDecision] = lambda _allowance, decision: decision

    @property
    def decisions(self) -> list[LimitDecision]:
        """Return the decisions alone."""
        return [decision for _allowance, decision in self.by]

    @property
    def error(self) -> Refused:
        """Return the error for the client."""
        return refusal([self.estimate(allowance, decision) for allowance, decision in self.by])


@dataclass(slots=True, eq=False, kw_only=True)
class Waiter:
    """A request in the `lines` of whoever refused it. `tokens` maps all of its allowances to what it is expected to need
    there."""

    seq: int
    request: AdmissionRequest
    tokens: Mapping[Allowance, int]
    attempt: Callable[[Waiter], Reservation | Refusals]
    deadline_s: float
    answer: asyncio.Future[Reservation]
    lines: set[Allowance] = field(default_factory=set)
    alarm: Alarm | None = None
    context: contextvars.Context = field(default_factory=contextvars.copy_context)  # with the request's id for the log


class AdmissionQueue:
    """The lines of all owners. Belongs to one event loop; nothing in it waits but `wait`."""

    def __init__(self, clock: Clock, *, later: Later = on_the_loop, observer: WaitObserver | None = None) -> None:
        self._clock = clock
        self._later = later
        self._observer = observer
        self._seq = itertools.count()
        self._lines: dict[Allowance, Line[Waiter]] = {}
        self._waiting: set[Waiter] = set()
        self._moved: set[Allowance] = set()  # lines whose waiters are to be tried again
        self._due: deque[Waiter] = deque()  # the waiters to be tried next, in order of arrival
        self._trying = False

    @property
    def waiting(self) -> list[AdmissionRequest]:
        """Return the requests that wait."""
        return [waiter.request for waiter in self._waiting]

    def ahead(self, allowance: Allowance, waiter: Waiter | None = None) -> Ahead:
        """Return what those before `waiter` in the line need; everyone in it when None, for a newcomer."""
        line = self._lines.get(allowance)
        return NOTHING_AHEAD if line is None else line.ahead(None if waiter is None else waiter.seq)

    def has_room(self, refusals: Refusals, tenant_id: str) -> bool:
        """Return whether one more request of the tenant may join the lines of those that refused it."""
        lines = [self._lines[allowance] for allowance, _decision in refusals.by if allowance in self._lines]
        return _has_place(self._waiting, tenant_id, WAITING_MAX) and all(
            _has_place(list(line), tenant_id, LINE_MAX) for line in lines
        )

    async def wait(
        self,
        request: AdmissionRequest,
        refusals: Refusals,
        tokens: Mapping[Allowance, int],
        attempt: Callable[[Waiter], Reservation | Refusals],
        wait_s: float,
    ) -> Reservation:
        """Return the reservation as soon as `attempt` finds room. `tokens` is what is needed of each of its allowances.

        Raises the last refusal after `wait_s`, and what `refuse_all` was given. A caller that is cancelled takes nothing.
        """
        with self._observed(request.model):
            waiter = Waiter(
                seq=next(self._seq),
                request=request,
                tokens=tokens,
                attempt=attempt,
                deadline_s=self._clock.monotonic_s() + wait_s,
                answer=asyncio.get_running_loop().create_future(),
            )
            kept = False
            try:
                self._waiting.add(waiter)
                self._join_lines(waiter, refusals)
                await asyncio.wait((waiter.answer,))
                kept = True
                return waiter.answer.result()
            finally:
                self._discard(waiter, kept=kept)

    @contextmanager
    def _observed(self, model: str) -> Iterator[None]:
        """Tell the observer how long a wait was and how it ended."""
        if self._observer is None:
            yield
            return
        began_s, how = self._clock.monotonic_s(), "failed"
        self._observer.wait_began(model)
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
        """Try everyone in these lines again, in order of arrival: something was given back, or a waiter has left.

        That happens in the next turns of the event loop, once for everything within a turn, and TRIES_PER_TURN at a time.
        Newcomers do not get in between: they leave room for those who wait.
        """
        self._moved.update(allowance for allowance in allowances if allowance in self._lines)
        self._schedule_tries()

    def _schedule_tries(self) -> None:
        if (self._moved or self._due) and not self._trying:
            self._trying = True
            asyncio.get_running_loop().call_soon(self._try_some)

    def _try_some(self) -> None:
        """Try some of those that are due. Lines that moved meanwhile come after them."""
        self._trying = False
        if not self._due:
            waiters = {waiter for allowance in self._moved for waiter in self._lines.get(allowance, ())}
            self._moved.clear()
            self._due.extend(sorted(waiters, key=lambda each: each.seq))
        try:
            for _ in range(min(TRIES_PER_TURN, len(self._due))):
                waiter = self._due.popleft()
                if waiter in self._waiting:
                    self._moved |= self._try(waiter)
        finally:
            self._schedule_tries()

    def refuse_all(self, error: Exception) -> None:
        """End every wait with `error`."""
        for waiter in list(self._waiting):
            self._refuse(waiter, error)

    def _try(self, waiter: Waiter) -> set[Allowance]:
        """Try `waiter` once; return the lines in which others have moved up because of it. A bug ends its wait and no other."""
        try:
            return self._try_once(waiter)
        except Exception as error:  # noqa: BLE001 - nobody awaits this callback: whoever waits is told
            return self._fail(waiter, error)

    def _try_once(self, waiter: Waiter) -> set[Allowance]:
        answer = waiter.attempt(waiter)
        if isinstance(answer, Reservation):
            return self._admit(waiter, answer)
        left_s = waiter.deadline_s - self._clock.monotonic_s()
        if left_s <= 0 or not may_wait(answer.decisions, left_s + ROUNDING_S):
            return self._refuse(waiter, answer.error)
        return self._join_lines(waiter, answer)

    def _admit(self, waiter: Waiter, reservation: Reservation) -> set[Allowance]:
        """End a wait with `reservation` and return the lines that the waiter has left."""
        try:
            left = self._leave(waiter)
            waiter.answer.set_result(reservation)
        except Exception:
            reservation.void()
            raise
        return left

    def _fail(self, waiter: Waiter, error: Exception) -> set[Allowance]:
        """Log the bug that is being handled, and end a wait with it; return the lines that the waiter has left."""
        request = waiter.request
        waiter.context.run(_log.exception, "admission_failed", model=request.model, key_id=request.key_id)
        return self._refuse(waiter, error)

    def _refuse(self, waiter: Waiter, error: Exception) -> set[Allowance]:
        """End a wait with `error` and return the lines that the waiter has left."""
        if not waiter.answer.done():
            waiter.answer.set_exception(error)
        return self._leave(waiter)

    def _join_lines(self, waiter: Waiter, refusals: Refusals) -> set[Allowance]:
        """Join the line of every owner that refused, leave and return those of models that did not, and plan a retry."""
        refusing = {allowance for allowance, _decision in refusals.by}
        for allowance in refusing:
            for_window = any(each is allowance and d.kind in WINDOW_KINDS for each, d in refusals.by)
            line = self._lines.get(allowance, Line())
            line.join(waiter.seq, waiter, waiter.tokens[allowance], for_window=for_window)
            self._lines[allowance] = line
            waiter.lines.add(allowance)
        left = {each for each in waiter.lines if each.owner.scope == "model" and each not in refusing}
        for allowance in left:
            self._leave_line(waiter, allowance)
        self._plan(waiter, known_wait_s(refusals.decisions) or waiter.deadline_s - self._clock.monotonic_s())
        return left

    def _plan(self, waiter: Waiter, delay_s: float) -> None:
        if waiter.alarm is not None:
            waiter.alarm.cancel()
        waiter.alarm = self._later(delay_s, lambda: self.wake(list(waiter.lines)))

    def _leave(self, waiter: Waiter) -> set[Allowance]:
        """Leave every line and return them."""
        self._waiting.discard(waiter)
        if waiter.alarm is not None:
            waiter.alarm.cancel()
        left = set(waiter.lines)
        for allowance in left:
            self._leave_line(waiter, allowance)
        return left

    def _leave_line(self, waiter: Waiter, allowance: Allowance) -> None:
        line = self._lines[allowance]
        line.leave(waiter.seq)
        waiter.lines.discard(allowance)
        if not line:
            del self._lines[allowance]

    def _discard(self, waiter: Waiter, *, kept: bool) -> None:
        """Remove a waiter that nobody awaits any more. If it was admitted just then, that is put back; those behind move up."""
        left = self._leave(waiter)
        if not kept and waiter.answer.done() and waiter.answer.exception() is None:
            waiter.answer.result().void()
        self.wake(left)


def _has_place(waiters: Collection[Waiter], tenant_id: str, places: int) -> bool:
    return has_place(sum(waiter.request.tenant_id == tenant_id for waiter in waiters), len(waiters), places)


def known_wait_s(decisions: Iterable[LimitDecision]) -> float:
    """Return the longest exact wait of the refusing limits; 0 when all depend on running requests."""
    return max((decision.wait_s or 0.0 for decision in decisions if not decision.estimated), default=0.0)


def may_wait(decisions: Iterable[LimitDecision], patience_s: float) -> bool:
    """Return whether a refused request could be admitted within `patience_s`; estimated waits are taken to be short enough."""
    refused = list(decisions)
    return patience_s > 0 and all(decision.wait_s is not None for decision in refused) and known_wait_s(refused) <= patience_s
