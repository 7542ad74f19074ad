"""Limits as arithmetic: the token bucket, the calendar window, and the decision. Pure integers; no clock, no database."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Literal

MICROS_PER_S = 1_000_000
DEBT_MINUTES_MAX = 60
_UNITS_PER_TOKEN = 60 * MICROS_PER_S  # a bucket of C tokens a minute gains exactly C units each microsecond

LimitScope = Literal["tenant", "key"]
LimitKind = Literal["tokens", "requests", "concurrency", "tokens_per_day", "budget"]


def _micros(moment_s: float) -> int:
    return round(moment_s * MICROS_PER_S)


def ceil_to_ms(micros: int) -> float:
    """Return `micros` in seconds, rounded up to a whole millisecond."""
    return -(-micros // 1000) / 1000


class TokenBucket:
    """`capacity` tokens at most, refilled evenly at `capacity` per minute. Exact: levels are integers of 1/60 000 000 token.

    Over any stretch of t seconds no more than capacity + capacity/60 * t tokens are taken. What a request used beyond what it
    had taken is charged afterwards and may leave a debt, so that the rate holds in the long run. The debt is bounded by
    DEBT_MINUTES_MAX capacities: however large the surprise was, tokens are there again after that many minutes.
    """

    __slots__ = ("_at_us", "_units", "capacity")

    def __init__(self, capacity: int, now_s: float) -> None:
        self.capacity = capacity
        self._units = capacity * _UNITS_PER_TOKEN
        self._at_us = _micros(now_s)

    @property
    def rate_per_s(self) -> float:
        """Return the refill in tokens per second."""
        return self.capacity / 60

    def level(self, now_s: float) -> int:
        """Return the whole tokens that are there now; negative in debt."""
        self._refill(now_s)
        return self._units // _UNITS_PER_TOKEN

    def take(self, need: int, now_s: float) -> bool:
        """Take `need` tokens and return True, or take nothing and return False when they are not there."""
        self._refill(now_s)
        if need * _UNITS_PER_TOKEN > self._units:
            return False
        self._units -= need * _UNITS_PER_TOKEN
        return True

    def put_back(self, tokens: int, now_s: float) -> None:
        """Return tokens that were taken and not used."""
        self._refill(now_s)
        self._units = min(self._units + tokens * _UNITS_PER_TOKEN, self._units_max)

    def charge(self, tokens: int, now_s: float) -> None:
        """Take tokens that were used already, if need be into debt, down to minus DEBT_MINUTES_MAX capacities."""
        self._refill(now_s)
        self._units = max(self._units - tokens * _UNITS_PER_TOKEN, -DEBT_MINUTES_MAX * self._units_max)

    def wait_s(self, need: int, now_s: float) -> float | None:
        """Return after how many seconds `need` tokens are there: 0 when now, None when never (`need` above capacity).

        In whole milliseconds, rounded up: waiting this long is enough, one millisecond less is not.
        """
        if need > self.capacity:
            return None
        self._refill(now_s)
        missing = need * _UNITS_PER_TOKEN - self._units
        if missing <= 0:
            return 0.0
        return ceil_to_ms(-(-missing // self.capacity)) if self.capacity else None

    def resize(self, capacity: int, now_s: float) -> None:
        """Change the limit at once; what has been used of the old one counts against the new one."""
        if capacity == self.capacity:
            return
        self._refill(now_s)
        used = self._units_max - self._units
        self.capacity = capacity
        self._units = max(self._units_max - used, -self._units_max)

    @property
    def _units_max(self) -> int:
        return self.capacity * _UNITS_PER_TOKEN

    def _refill(self, now_s: float) -> None:
        now_us = _micros(now_s)
        if now_us > self._at_us:
            self._units = min(self._units + (now_us - self._at_us) * self.capacity, self._units_max)
            self._at_us = now_us


@dataclass(slots=True)
class Window:
    """What was used and what is reserved in one calendar day (tokens) or month (pico-units of money), in UTC."""

    start: date
    used: int = 0
    reserved: int = 0

    @property
    def taken(self) -> int:
        """Return what no other request may have."""
        return self.used + self.reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitDecision:
    """What one limit says to one request. `wait_s` is None when waiting cannot help. Budgets are in pico-units.

    `held`: it refuses only for what running requests hold, of which they may give something back when they end.
    """

    allowed: bool
    scope: LimitScope
    kind: LimitKind
    need: int
    limit: int
    level: int
    wait_s: float | None
    held: bool = False
