"""Time limits that count only time in which the event loop ran.

A process may stand still: starved of processors, stopped, or with its whole machine. When it goes on, limits by the clock are
over before the event loop has seen what was done meanwhile, so work that succeeded would count as timed out.
"""

from __future__ import annotations

import asyncio
from typing import Any

TICK_S = 0.25


async def done_within(future: asyncio.Future[Any], timeout_s: float) -> bool:
    """Return whether `future` is done within `timeout_s`. Neither a timeout nor a cancelled caller cancels it.

    Waits twice for half of that, because a pause of the process ends only one of the two waits.
    """
    for _ in range(2):
        done, _pending = await asyncio.wait({future}, timeout=timeout_s / 2)
        if done:
            return True
    return False


class AwakeStopwatch:
    """Measures one period at a time, in ticks of TICK_S: a pause of the process counts as one tick, whatever its length."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0
        """Since `start`; 0 after `stop`."""
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin, or go on, in the running event loop."""
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def stop(self) -> None:
        """End the period."""
        if self._timer is not None:
            self._timer.cancel()
        self.elapsed_s = 0.0

    def _tick(self) -> None:
        self.elapsed_s += TICK_S
        self.start()
