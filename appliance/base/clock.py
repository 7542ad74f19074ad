"""Time as an argument: everything that needs a time is given a `Clock`, so that tests can hold it still."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Two readings of time: `now` for records (UTC), `monotonic_s` for durations and buckets."""

    def now(self) -> datetime:
        """Return the current time, aware, in UTC."""
        ...

    def monotonic_s(self) -> float:
        """Return seconds that never run backwards; comparable between processes of one machine."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> datetime:
        """Return the current time, aware, in UTC."""
        return datetime.now(UTC)

    def monotonic_s(self) -> float:
        """Return CLOCK_MONOTONIC in seconds."""
        return time.monotonic()


def rfc3339(moment: datetime) -> str:
    """Return `moment` as RFC 3339 in UTC with milliseconds and a `Z`. Naive values are refused with ValueError."""
    if moment.tzinfo is None:
        raise ValueError("a time without a zone cannot be shown")
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
