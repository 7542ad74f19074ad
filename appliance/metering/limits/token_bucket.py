"""A token bucket with exact refunds. Pure integers; no clock, no database.

A refund leaves the bucket as if the refunded tokens had never been taken, also when the bucket would have been full meanwhile
and refill would have been lost. For that, the bucket keeps what happened between open takes. Whatever happens in such an
interval (refill up to the capacity, takes, charges down to the debt's bound), it maps the level before it to
min(max(before + shift, low), high). Such maps compose into one of the same form, so an interval is three integers, however much
happened in it.

    level ── open take ── interval ── open take ── interval ── now
                          (shift, low, high)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MICROS_PER_S = 1_000_000
DEBT_MINUTES_MAX = 60
UNITS_PER_TOKEN = 60 * MICROS_PER_S  # a bucket of C tokens a minute gains exactly C units each microsecond


def ceil_to_ms(micros: int) -> float:
    """Return `micros` in seconds, rounded up to a whole millisecond."""
    return -(-micros // 1000) / 1000


def _micros(moment_s: float) -> int:
    return round(moment_s * MICROS_PER_S)


@dataclass(slots=True)
class _Interval:
    """What happened between two open takes, as a map of levels. If `low` exceeds `high`, every level ends at `high`."""

    shift: int = 0
    low: float = -math.inf
    high: float = math.inf

    def add(self, units: int, *, low: float = -math.inf, high: float = math.inf) -> None:
        """Compose with a change by `units` whose result is clamped to `low` and `high`."""
        # Comparisons instead of min and max: this runs a dozen times per request.
        self.shift += units
        least, most = self.low + units, self.high + units
        self.low = low if least < low else least
        most = low if most < low else most
        self.high = high if most > high else most  # applied last: `high` also wins where it is below `low`

    def refill(self, units: int, full: int) -> None:
        """Compose with a gain up to `full`. A faster `add`, because every access to a bucket refills it."""
        self.shift += units
        self.low += units
        most = self.high + units
        self.high = full if most > full else most

    def then(self, later: _Interval) -> None:
        """Compose with a later interval."""
        self.add(later.shift, low=later.low, high=later.high)

    def apply(self, level: int) -> int:
        """Return the level after the interval. The result is whole: an infinite bound never binds."""
        return int(min(max(level + self.shift, self.low), self.high))


@dataclass(slots=True, eq=False)
class Take:
    """Units taken from a bucket that may still be refunded: open until settled. `before` is the level before the take."""

    bucket: TokenBucket
    units: int
    before: int
    after: _Interval = field(default_factory=_Interval)
    previous: Take | None = None
    next: Take | None = None


class TokenBucket:
    """Holds at most `capacity` tokens, refilled evenly at `capacity` per minute. Exact: a unit is 1/60 000 000 of a token.

    In any t seconds, at most capacity + capacity/60 * t tokens are taken and not refunded. What a request uses beyond its take
    is charged afterwards and may leave a debt, so that the rate holds in the long run. The debt is bounded by DEBT_MINUTES_MAX
    capacities: after at most that many minutes, tokens are available again.
    """

    __slots__ = ("_at_us", "_deferred_debt", "_last", "_refilled_s", "_units", "capacity")

    def __init__(self, capacity: int, now_s: float, *, units: int | None = None) -> None:
        self.capacity = capacity
        self._units = self._units_max if units is None else min(max(units, self._units_min), self._units_max)
        self._at_us = _micros(now_s)
        self._refilled_s = now_s
        self._last: Take | None = None
        self._deferred_debt = 0  # debt beyond one minute of a lowered limit; due when the limit is raised

    def units(self, now_s: float) -> int:
        """Return the level in units minus the deferred debt: what must survive a restart."""
        self._refill(now_s)
        return self._units - self._deferred_debt

    def level(self, now_s: float) -> int:
        """Return the whole tokens available now; negative when in debt."""
        self._refill(now_s)
        return self._units // UNITS_PER_TOKEN

    def take(self, need: int, now_s: float) -> Take | None:
        """Take `need` tokens and return the take, to be settled once; None, taking nothing, if they are not available."""
        self._refill(now_s)
        units = need * UNITS_PER_TOKEN
        if units > self._units:
            return None
        take = Take(self, units, self._units, previous=self._last)
        if self._last is not None:
            self._last.next = take
        self._last = take
        self._units -= units
        return take

    def settle(self, take: Take, used: int, now_s: float) -> None:
        """Close `take` once: unused tokens are refunded as if never taken, use beyond the take is charged now."""
        kept = min(used * UNITS_PER_TOKEN, take.units)
        self._give_back(take, kept)
        self._close(take)
        if used * UNITS_PER_TOKEN > kept:
            self.charge(used - kept // UNITS_PER_TOKEN, now_s)

    def charge(self, tokens: int, now_s: float) -> None:
        """Take tokens that have already been used, possibly into debt, down to minus DEBT_MINUTES_MAX capacities."""
        self._refill(now_s)
        self._change(-tokens * UNITS_PER_TOKEN, low=self._units_min)

    def wait_s(self, need: int, now_s: float, *, ahead: int = 0) -> float | None:
        """Return the seconds until `need` tokens are available: 0 if they are, None if never (`need` above capacity).

        In whole milliseconds, rounded up: waiting this long is enough, one millisecond less is not. `ahead` tokens are taken
        first, by waiters ahead.
        """
        if need > self.capacity:
            return None
        self._refill(now_s)
        missing = (ahead + need) * UNITS_PER_TOKEN - self._units
        if missing <= 0:
            return 0.0
        return ceil_to_ms(-(-missing // self.capacity)) if self.capacity else None

    def resize(self, capacity: int, now_s: float) -> None:
        """Change the capacity at once; what was used of the old one counts against the new one.

        Lowering it leaves at most one minute's debt; the rest is deferred until the limit is raised again.
        """
        if capacity == self.capacity:
            return
        self._refill(now_s)
        growth = (capacity - self.capacity) * UNITS_PER_TOKEN
        self.capacity = capacity
        unbounded = self._units + growth
        self._change(growth - min(self._deferred_debt, max(growth, 0)), low=-self._units_max)
        self._deferred_debt += self._units - unbounded

    @property
    def _units_max(self) -> int:
        return self.capacity * UNITS_PER_TOKEN

    @property
    def _units_min(self) -> int:
        return -DEBT_MINUTES_MAX * self._units_max

    def _refill(self, now_s: float) -> None:
        if now_s == self._refilled_s:
            return  # a bucket is read several times per moment
        self._refilled_s = now_s
        now_us = _micros(now_s)
        if now_us > self._at_us:
            gained, full = (now_us - self._at_us) * self.capacity, self._units_max
            level = self._units + gained
            if self._deferred_debt:
                self._deferred_debt = max(self._deferred_debt - max(level - full, 0), 0)
            self._units = full if level > full else level
            if self._last is not None:
                self._last.after.refill(gained, full)
            self._at_us = now_us

    def _change(self, units: int, *, low: int) -> None:
        self._units = max(self._units + units, low)
        if self._last is not None:
            self._last.after.add(units, low=low)

    def _give_back(self, take: Take, kept: int) -> None:
        """Shrink `take` to `kept` units, and recompute the levels from it on as if it had never been larger."""
        take.units = kept
        current: Take = take
        level = current.after.apply(current.before - current.units)
        while current.next is not None and current.next.before != level:
            current = current.next
            current.before = level
            level = current.after.apply(level - current.units)
        if current.next is None:
            self._units = level

    def _close(self, take: Take) -> None:
        """Merge a closed `take` and the interval after it into the interval before it."""
        if take.previous is not None:
            take.previous.after.add(-take.units)
            take.previous.after.then(take.after)
            take.previous.next = take.next
        if take.next is not None:
            take.next.previous = take.previous
        if self._last is take:
            self._last = take.previous
