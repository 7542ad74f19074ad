"""What one owner of limits has used and reserved in each day and month of the billing calendar. No clock, no database."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from typing import TypeVar

import msgspec

WINDOWS_KEPT = 4

_Period = TypeVar("_Period")


class Moment(msgspec.Struct, frozen=True):
    """One reading of both clocks, so that all limits of a decision see the same time, and its billing day."""

    now: datetime
    monotonic_s: float
    day: date
    next_day_start: datetime

    @property
    def month(self) -> date:
        """Return the first day of the month."""
        return self.day.replace(day=1)


@dataclass(slots=True)
class Window:
    """What is used and reserved in one day (tokens), or in one month in one currency (its pico-units).

    `shadow_used` and `shadow_reserved` are the parts that limits in shadow mode would have refused. `running_cost` is the part
    of `reserved` that running requests have cost so far.
    """

    start: date
    used: int = 0
    reserved: int = 0
    shadow_used: int = 0
    shadow_reserved: int = 0
    running_cost: int = 0


@dataclass(slots=True)
class Month:
    """One month of the billing calendar. Each currency has its own window: amounts in different ones cannot be added."""

    start: date
    _by_currency: dict[str, Window] = field(default_factory=dict)

    def window(self, currency: str) -> Window:
        """Return what is used and reserved in `currency`."""
        found = self._by_currency.get(currency)
        if found is None:
            found = self._by_currency[currency] = Window(self.start)
        return found


class Windows:
    """The last WINDOWS_KEPT days and months of one owner. A running request keeps those in which it was admitted."""

    def __init__(self, at: Moment) -> None:
        self._days: dict[date, Window] = {}
        self._months: dict[date, Month] = {}
        self.day = _entered(self._days, at.day, 1, Window)
        self.month = _entered(self._months, at.month, 31, Month)

    def enter(self, at: Moment) -> tuple[Window, Month]:
        """Make the day and month of `at` current and return them."""
        if self.day.start != at.day:
            self.day = _entered(self._days, at.day, 1, Window)
            self.month = _entered(self._months, at.month, 31, Month)
        return self.day, self.month

    def find(self, day: date) -> tuple[Window | None, Month | None]:
        """Return a day and its month, None for one that was never entered or is no longer kept."""
        return self._days.get(day), self._months.get(day.replace(day=1))


def _entered(periods: dict[date, _Period], start: date, step_days: int, new: Callable[[date], _Period]) -> _Period:
    """Return the day or month that begins at `start`, also when the clock returns to it after a jump.

    If the clock steps back into one that was never entered, one that begins at most `step_days` later is returned instead:
    otherwise a clock set back over midnight would grant a second day.
    """
    entered = min((known for known in periods if start <= known <= start + timedelta(days=step_days)), default=start)
    period = periods.pop(entered, None) or new(entered)
    periods[entered] = period
    while len(periods) > WINDOWS_KEPT:
        del periods[next(iter(periods))]
    return period
