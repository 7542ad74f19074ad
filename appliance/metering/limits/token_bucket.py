"""The token bucket as exact arithmetic, with takes that may still be given back. Pure integers; no clock, no database.

A take that is given back leaves the bucket as if it had never been, also when the bucket would have been full meanwhile and
the refill lost. To know that, the bucket keeps what happened between open takes. Whatever happens in a stretch of time (refill
up to the brim, takes, charges down to the bound of the debt), it maps the level before to min(max(before + shift, low), high):
such maps compose into one of their kind, so a stretch is three integers however much happened in it.

    level ── open take ── stretch ── open take ── stretch ── now
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
class _Stretch:
    """What happened between two open takes, as a map of levels. Where `low` exceeds `high`, every level ends at `high`."""

    shift: int = 0
    low: float = -math.inf
    high: float = math.inf

    def add(self, units: int, *, low: float = -math.inf, high: float = math.inf) -> None:
        """Compose with a change by `units` that ends within `low` and `high`."""
        # Comparisons instead of min and max: this runs a dozen times per request.
        self.shift += units
        least, most = self.low + units, self.high + units
        self.low = low if least < low else least
        most = low if most < low else most
        self.high = high if most > high else most  # last, for `high` also wins where it is below `low`

    def refill(self, units: int, full: int) -> None:
        """Compose with a gain that ends at `full` at most. A shorter `add`, for it comes with each question to a bucket."""
        self.shift += units
        self.low += units
        most = self.high + units
        self.high = full if most > full else most

    def then(self, later: _Stretch) -> None:
        """Compose with a later stretch."""
        self.add(later.shift, low=later.low, high=later.high)

    def apply(self, level: int) -> int:
        """Return the level after the stretch. Bounds are whole wherever they matter: an infinite one never binds."""
        return int(min(max(level + self.shift, self.low), self.high))


@dataclass(slots=True, eq=False)
class Take:
    """Units that were taken and may still be given back: open until it is settled. `before` is the level that it met."""

    bucket: TokenBucket
    units: int
    before: int
    after: _Stretch = field(default_factory=_Stretch)
    previous: Take | None = None
    next: Take | None = None


class TokenBucket:
    """`capacity` tokens at most, refilled evenly at `capacity` per minute. Exact: levels are integers of 1/60 000 000 token.

    Over any stretch of t seconds no more than capacity + capacity/60 * t tokens are taken and kept. What a request used beyond
    what it had taken is charged afterwards and may leave a debt, so that the rate holds in the long run. The debt is bounded by
    DEBT_MINUTES_MAX capacities: however large the surprise was, tokens are there again after that many minutes.
    """

    __slots__ = ("_at_us", "_forgone", "_last", "_seen_s", "_units", "capacity")

    def __init__(self, capacity: int, now_s: float, *, units: int | None = None) -> None:
        self.capacity = capacity
        self._units = self._units_max if units is None else min(max(units, self._units_min), self._units_max)
        self._at_us = _micros(now_s)
        self._seen_s = now_s
        self._last: Take | None = None
        self._forgone = 0  # debt that a smaller limit does not ask for, and a larger one would

    def units(self, now_s: float) -> int:
        """Return the level in units, with what a resize has put aside: what a restart must remember."""
        self._refill(now_s)
        return self._units - self._forgone

    def level(self, now_s: float) -> int:
        """Return the whole tokens that are there now; negative in debt."""
        self._refill(now_s)
        return self._units // UNITS_PER_TOKEN

    def take(self, need: int, now_s: float) -> Take | None:
        """Take `need` tokens and return what must be settled once, or take nothing and return None when they are not there."""
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
        """Close `take`, once, at the `used` tokens: less than taken is as if only that had been taken, more is charged now."""
        kept = min(used * UNITS_PER_TOKEN, take.units)
        self._give_back(take, kept)
        self._close(take)
        if used * UNITS_PER_TOKEN > kept:
            self.charge(used - kept // UNITS_PER_TOKEN, now_s)

    def charge(self, tokens: int, now_s: float) -> None:
        """Take tokens that were used already, if need be into debt, down to minus DEBT_MINUTES_MAX capacities."""
        self._refill(now_s)
        self._change(-tokens * UNITS_PER_TOKEN, low=self._units_min)

    def wait_s(self, need: int, now_s: float, *, ahead: int = 0) -> float | None:
        """Return after how many seconds `need` tokens are there: 0 when now, None when never (`need` above capacity).

        In whole milliseconds, rounded up: waiting this long is enough, one millisecond less is not. `ahead` tokens are promised
        to others, who take them as soon as they are there.
        """
        if need > self.capacity:
            return None
        self._refill(now_s)
        missing = (ahead + need) * UNITS_PER_TOKEN - self._units
        if missing <= 0:
            return 0.0
        return ceil_to_ms(-(-missing // self.capacity)) if self.capacity else None

    def resize(self, capacity: int, now_s: float) -> None:
        """Change the limit at once; what has been used of the old one counts against the new one.

        A smaller limit asks for one minute's debt at most; the rest is put aside and counts if the limit is raised again.
        """
        if capacity == self.capacity:
            return
        self._refill(now_s)
        grown = (capacity - self.capacity) * UNITS_PER_TOKEN
        self.capacity = capacity
        asked = self._units + grown
        self._change(grown - min(self._forgone, max(grown, 0)), low=-self._units_max)
        self._forgone += self._units - asked

    @property
    def _units_max(self) -> int:
        return self.capacity * UNITS_PER_TOKEN

    @property
    def _units_min(self) -> int:
        return -DEBT_MINUTES_MAX * self._units_max

    def _refill(self, now_s: float) -> None:
        if now_s == self._seen_s:
            return  # one moment asks a bucket many things
        self._seen_s = now_s
        now_us = _micros(now_s)
        if now_us > self._at_us:
            gained, full = (now_us - self._at_us) * self.capacity, self._units_max
            level = self._units + gained
            if self._forgone:
                self._forgone = max(self._forgone - max(level - full, 0), 0)
            self._units = full if level > full else level
            if self._last is not None:
                self._last.after.refill(gained, full)
            self._at_us = now_us

    def _change(self, units: int, *, low: int) -> None:
        self._units = max(self._units + units, low)
        if self._last is not None:
            self._last.after.add(units, low=low)

    def _give_back(self, take: Take, kept: int) -> None:
        """Shrink `take` to `kept` units, and replay what the later open takes met, as if it had never been larger."""
        take.units = kept
        step: Take = take
        level = step.after.apply(step.before - step.units)
        while step.next is not None and step.next.before != level:
            step = step.next
            step.before = level
            level = step.after.apply(level - step.units)
        if step.next is None:
            self._units = level

    def _close(self, take: Take) -> None:
        """Forget that `take` was open: it becomes part of the stretch before it."""
        if take.previous is not None:
            take.previous.after.add(-take.units)
            take.previous.after.then(take.after)
            take.previous.next = take.next
        if take.next is not None:
            take.next.previous = take.previous
        if self._last is take:
            self._last = take.previous
