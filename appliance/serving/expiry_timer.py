"""Ends a live request when its key expires."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime

from appliance.base.clock import Clock


class ExpiryTimer:
    """Calls `on_expiry` at the time that was set last."""

    def __init__(self, clock: Clock, on_expiry: Callable[[], None]) -> None:
        self._clock = clock
        self._on_expiry = on_expiry
        self._timer: asyncio.TimerHandle | None = None

    def set(self, expires_at: datetime | None) -> None:
        """Set when the key expires; None means never. A time in the past calls at the next turn of the event loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if expires_at is not None:
            left_s = max((expires_at - self._clock.now()).total_seconds(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(left_s, self._on_expiry)
