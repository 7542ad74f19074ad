"""A clock that only the test moves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

START = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


class FakeClock:
    """Wall clock and monotonic clock, in whole microseconds; `advance` moves both."""

    def __init__(self, start: datetime = START, monotonic_s: float = 1000.0) -> None:
        self._now = start
        self._monotonic_us = round(monotonic_s * 1e6)

    def now(self) -> datetime:
        """Return the wall-clock time that the test has set."""
        return self._now

    def monotonic_s(self) -> float:
        """Return the monotonic reading that the test has set."""
        return self._monotonic_us / 1e6

    def advance(self, seconds: float) -> None:
        """Move both clocks forward."""
        micros = round(seconds * 1e6)
        assert micros >= 0, "time does not run backwards"
        self._now += timedelta(microseconds=micros)
        self._monotonic_us += micros

    def jump_wall(self, seconds: float) -> None:
        """Move only the wall clock, forwards or back, as an operator or NTP would."""
        self._now += timedelta(seconds=seconds)
