"""Injectable clock: code that needs the time receives a `Clock`, so that tests can control it."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Two readings of time: `now` for records (UTC), `monotonic_s` for durations and buckets."""

    def now(self) -> datetime:
        """Return the current time as an aware UTC datetime."""
        ...

    def monotonic_s(self) -> float:
        """Return monotonic seconds, comparable between processes on one machine."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> datetime:
        """Return the current time as an aware UTC datetime."""
        return datetime.now(UTC)

    def monotonic_s(self) -> float:
        """Return CLOCK_MONOTONIC in seconds."""
        return time.monotonic()


def rfc3339(moment: datetime) -> str:
    """Return `moment` as RFC 3339 in UTC with milliseconds and a `Z`. Raises ValueError for a naive datetime."""
    if moment.tzinfo is None:
        raise ValueError("a time without a time zone cannot be formatted")
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def whole_seconds(wait_s: float) -> int:
    """Return the value of a `retry-after` header: whole seconds, at least one, rounded up so that there is room by then."""
    return max(1, math.ceil(wait_s))


def format_wait(wait_s: float) -> str:
    """Return a duration in readable units, rounded up: 20 ms, 13 s, 4 min 5 s, 3 h 12 min, 2 d 7 h."""
    milliseconds = max(1, math.ceil(wait_s * 1000))
    if milliseconds < 1000:
        return f"{milliseconds} ms"
    seconds = math.ceil(milliseconds / 1000)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return _two_units(seconds, 60, "min", "s")
    minutes = math.ceil(seconds / 60)
    if minutes < 24 * 60:
        return _two_units(minutes, 60, "h", "min")
    return _two_units(math.ceil(minutes / 60), 24, "d", "h")


def _two_units(length: int, size: int, large: str, small: str) -> str:
    whole, rest = divmod(length, size)
    return f"{whole} {large} {rest} {small}" if rest else f"{whole} {large}"
