"""What one owner of limits has used and reserved in each day and month of the billing calendar. No clock, no database."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta

import msgspec

WINDOWS_KEPT = 4


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
    """What is used and reserved in one day (tokens) or month (pico-units of money) of the billing calendar.

    `shadow_used` is the part of `used` that limits in shadow mode would have refused. `running_cost` is the part of `reserved`
    that running requests have cost so far. `other_currencies` are costs in other currencies, which do not count towards the
    budget.
    """

    start: date
    used: int = 0
    reserved: int = 0
    shadow_used: int = 0
    running_cost: int = 0
    other_currencies: dict[str, int] = field(default_factory=dict)


class Windows:
    """The last WINDOWS_KEPT days and months of one owner. A running request keeps those in which it was admitted."""

    def __init__(self, at: Moment) -> None:
        self._days: dict[date, Window] = {}
        self._months: dict[date, Window] = {}
        self.day = _entered(self._days, at.day, 1)
        self.month = _entered(self._months, at.month, 31)

    def enter(self, at: Moment) -> tuple[Window, Window]:
        """Make the day and month of `at` current and return them."""
        if self.day.start != at.day:
            self.day = _entered(self._days, at.day, 1)
            self.month = _entered(self._months, at.month, 31)
        return self.day, self.month

    def find(self, day: date) -> tuple[Window | None, Window | None]:
        """Return a day and its month, None for one that was never entered or is no longer kept."""
        return self._days.get(day), self._months.get(day.replace(day=1))

    @property
    def months(self) -> Iterable[Window]:
        """Return the months that are kept."""
        return self._months.values()


def _entered(windows: dict[date, Window], start: date, step_days: int) -> Window:
    """Return the window that begins at `start`, also when the clock returns to it after a jump.

    If the clock steps back into a window that was never entered, a window that begins at most `step_days` later is returned
    instead: otherwise a clock set back over midnight would grant a second day.
    """
    entered = min((known for known in windows if start <= known <= start + timedelta(days=step_days)), default=start)
    window = windows.pop(entered, None) or Window(entered)
    windows[entered] = window
    while len(windows) > WINDOWS_KEPT:
        del windows[next(iter(windows))]
    return window
