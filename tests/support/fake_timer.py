"""Timers on a clock that the test moves: `advance` runs each call when it is due, as an event loop would."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable

from tests.support.clock import FakeClock

LOOP_ITERATIONS = 10  # enough for every task that was woken to continue


class ScheduledCall:
    """A call that is scheduled."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Do not make the call."""
        self.call = None


class FakeTimer:
    """Stands in for the event loop's timer."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self._count = itertools.count()
        self._planned: list[tuple[int, int, ScheduledCall]] = []

    def call_later(self, delay_s: float, call: Callable[[], None]) -> ScheduledCall:
        """Schedule `call` in `delay_s` seconds."""
        planned = ScheduledCall(call)
        due_us = round((self._clock.monotonic_s() + delay_s) * 1e6)
        heapq.heappush(self._planned, (due_us, next(self._count), planned))
        return planned

    async def advance(self, seconds: float) -> None:
        """Move the clock from one scheduled call to the next, up to `seconds` from now."""
        end_us = round((self._clock.monotonic_s() + seconds) * 1e6)
        while self._planned and self._planned[0][0] <= end_us:
            due_us, _, planned = heapq.heappop(self._planned)
            if planned.call is None:
                continue
            self._clock.advance(max(due_us / 1e6 - self._clock.monotonic_s(), 0.0))
            planned.call()
            await self.settle()
        self._clock.advance(end_us / 1e6 - self._clock.monotonic_s())
        await self.settle()

    async def settle(self) -> None:
        """Let the tasks that were woken continue."""
        for _ in range(LOOP_ITERATIONS):
            await asyncio.sleep(0)
