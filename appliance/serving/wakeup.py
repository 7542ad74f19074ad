"""Lets one task wait for another in the same event loop. Used for every token of every stream; cheaper than `asyncio.Event`."""

from __future__ import annotations

import asyncio


class Wakeup:
    """Wakes one waiting task. Carries no state: the waiting task checks its own condition before and after `wait`."""

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline_s = 0.0

    def wake(self) -> None:
        """Wake the waiting task, if there is one."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Return at the next `wake`, or after `timeout_s`. Only one task may wait at a time.

        The timer of an earlier wait is left running and only rescheduled when it fires, because most waits are short.
        """
        assert self._waiter is None, "one task waits at a time"
        loop = asyncio.get_running_loop()
        if timeout_s is not None:
            self._deadline_s = loop.time() + timeout_s
            if self._timer is None or self._timer.when() > self._deadline_s:
                self.clear()
                self._timer = loop.call_at(self._deadline_s, self._on_timer, loop)
        self._waiter = loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def clear(self) -> None:
        """Cancel the timer. Call it when no task will wait any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._waiter is None:
            return
        if loop.time() < self._deadline_s:
            self._timer = loop.call_at(self._deadline_s, self._on_timer, loop)
        else:
            self.wake()
