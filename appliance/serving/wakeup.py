"""Waits of one task for another in the same event loop, one for each token of each stream: cheaper than `asyncio.Event`."""

from __future__ import annotations

import asyncio


class Wakeup:
    """Wakes one waiting task. What it waited for is for the two to agree on: look, and wait while it is not there."""

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._until_s = 0.0

    def wake(self) -> None:
        """Wake whoever waits, if anybody does."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Return at the next `wake`, or after `timeout_s`. One task at a time.

        A timer that was set for an earlier wait is left running, and set again only when it fires: most waits are short.
        """
        assert self._waiter is None, "one task waits at a time"
        loop = asyncio.get_running_loop()
        if timeout_s is not None:
            self._until_s = loop.time() + timeout_s
            if self._alarm is None or self._alarm.when() > self._until_s:
                self.clear()
                self._alarm = loop.call_at(self._until_s, self._ring, loop)
        self._waiter = loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def clear(self) -> None:
        """Stop the timer, when nobody will wait any more."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        self._alarm = None
        if self._waiter is None:
            return
        if loop.time() < self._until_s:
            self._alarm = loop.call_at(self._until_s, self._ring, loop)
        else:
            self.wake()
