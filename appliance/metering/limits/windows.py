"""Days and months of the billing calendar, and what one owner of limits has used and holds in each. No clock, no database."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta

import msgspec

WINDOWS_KEPT = 4


class Moment(msgspec.Struct, frozen=True):
    """One reading of both clocks, so that all limits of a decision see the same time, and the day it lies in."""

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
    """What was used and what is reserved in one day (tokens) or month (pico-units of money) of the billing calendar.

    `shadowed` is the part of `used` that limits in shadow mode would have refused. `live` is what running requests have cost so
    far, of what is reserved for them. `others` is the money used in currencies that do not count.
    """

    start: date
    used: int = 0
    reserved: int = 0
    shadowed: int = 0
    live: int = 0
    others: dict[str, int] = field(default_factory=dict)


class Windows:
    """The last WINDOWS_KEPT days and months of one owner. A request keeps those in which it was admitted."""

    def __init__(self, at: Moment) -> None:
        self._days: dict[date, Window] = {}
        self._months: dict[date, Window] = {}
        self.day = _entered(self._days, at.day, 1)
        self.month = _entered(self._months, at.month, 31)

    def enter(self, at: Moment) -> tuple[Window, Window]:
        """Return the day and the month of `at`; from now on `day` and `month` are these."""
        if self.day.start != at.day:
            self.day = _entered(self._days, at.day, 1)
            self.month = _entered(self._months, at.month, 31)
        return self.day, self.month

    def find(self, day: date) -> tuple[Window | None, Window | None]:
        """Return a day and its month, None where it was never entered or is not kept any more."""
        return self._days.get(day), self._months.get(day.replace(day=1))

    @property
    def months(self) -> Iterable[Window]:
        """Return all months that are kept."""
        return self._months.values()


def _entered(windows: dict[date, Window], start: date, step_days: int) -> Window:
    """Return the window that begins at `start`, the same as before if the clock had jumped ahead and was set right.

    If the clock steps back into a window that was never entered, and one that begins at most `step_days` later is known, that
    one is returned: otherwise a clock set back over midnight would grant a second day.
    """
    known = min((each for each in windows if start <= each <= start + timedelta(days=step_days)), default=start)
    window = windows.pop(known, None) or Window(known)
    windows[known] = window
    while len(windows) > WINDOWS_KEPT:
        del windows[next(iter(windows))]
    return window
