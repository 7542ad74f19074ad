"""Requests that wait for room in their limits, on a clock that only the test moves, and an observer that records the waits."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from appliance.metering.limits.limit_waits import LimitWait
from appliance.metering.limits.reservations import Reservation
from appliance.tenancy.principals import Limits, Principal
from tests.support.clock import FakeClock
from tests.support.empty_sums import EmptySums
from tests.support.factories import admission_request
from tests.support.fake_timer import FakeTimer
from tests.support.ledgers import num_waiting, utc_admission


class Queue:
    """Admission on a clock that only the test moves, and the requests that wait in it."""

    def __init__(self, clock: FakeClock, **options: Any) -> None:
        self.timer = FakeTimer(clock)
        self.admission = utc_admission(clock, EmptySums(), call_later=self.timer.call_later, **options)
        self._tasks: list[asyncio.Task[Reservation]] = []
        self._failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: self._failures.append(context))

    def num_scheduled_retries(self) -> int:
        """Return the number of scheduled retries."""
        return sum(planned.call is not None for _due_us, _number, planned in self.timer._planned)

    async def refusing_limits(self, who: Principal, tokens: int, **changes: Any) -> set[tuple[str, str]]:
        """Return the scope and kind of each limit that would refuse one more request."""
        dry_run = await self.admission.dry_run(admission_request(who, tokens, **changes))
        return {(decision.scope, decision.kind) for decision in dry_run.refusals}

    async def submit(
        self, who: Principal, tokens: int, *, wait_s: float = 60.0, wait: LimitWait | None = None, **changes: Any
    ) -> asyncio.Task[Reservation]:
        """Start an admission and let it run until it is decided or waits. `wait` receives its wait."""
        task = asyncio.create_task(self.admission.admit(admission_request(who, tokens, **changes), wait_s, wait))
        self._tasks.append(task)
        await self.timer.settle()
        return task

    async def close(self) -> None:
        """Cancel the waiting requests, and check that no callback failed unnoticed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert num_waiting(self.admission) == 0
        assert not self.admission._queue._queues, "a waiter was left in a queue"
        assert self._failures == []


class Waits:
    """An observer that records the beginning and end of each wait."""

    def __init__(self) -> None:
        self.records: list[tuple[str, str, float]] = []

    def wait_ended(self, model: str, how: str, waited_s: float) -> None:
        self.records.append((how, model, round(waited_s, 3)))


def limited(who: Principal, limits: Limits) -> dict[str, Principal]:
    """Return the principal with other limits of its tenant, by the id of its key."""
    return {who.key.id: dataclasses.replace(who, tenant=dataclasses.replace(who.tenant, limits=limits))}
