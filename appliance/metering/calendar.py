"""Days and months of the billing time zone, and when they begin in UTC. Knows no money and reads no clock.

All code that deals with days or months uses this module, so that a limit, a report and an invoice mean the same day. A day on
which clocks change has 23 or 25 hours. A day whose midnight is skipped begins with the first moment after the gap; one whose
midnight occurs twice begins with the first.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

from appliance.base.errors import InvalidValue

MONTH_PATTERN = "^[1-9][0-9]{3}-(0[1-9]|1[0-2])$"
_ONE_DAY = timedelta(days=1)


class BillingCalendar:
    """The calendar of one IANA time zone, such as `Europe/Zurich`. Raises KeyError for a zone that does not exist."""

    def __init__(self, time_zone: str = "UTC") -> None:
        self.time_zone = time_zone
        self._zone = ZoneInfo(time_zone)

    def day_of(self, moment: datetime) -> date:
        """Return the billing day of `moment`. Raises ValueError if it has no time zone."""
        if moment.tzinfo is None:
            raise ValueError("moment must have a time zone")
        return self.local(moment).date()

    def local(self, moment: datetime) -> datetime:
        """Return `moment` as local time of the zone, in UTC where that would be before the year 1 or after the year 9999."""
        try:
            return moment.astimezone(self._zone)
        except OverflowError:
            return moment.astimezone(UTC)

    def day_start(self, of: datetime | date) -> datetime:
        """Return the start in UTC of the day `of`, or of the day that contains the moment `of`."""
        day = self.day_of(of) if isinstance(of, datetime) else of
        midnight = datetime.combine(day, time.min, tzinfo=self._zone)
        # A skipped midnight converts to a local time later by the length of the gap, possibly after the first moment of the
        # day.
        start = midnight.astimezone(UTC)
        if start.astimezone(self._zone).time() == time.min:
            return start
        return self._end_of_gap(start, day)

    def next_day_start(self, of: datetime | date) -> datetime:
        """Return the start in UTC of the day after `of`."""
        return self.day_start((self.day_of(of) if isinstance(of, datetime) else of) + _ONE_DAY)

    def month_of(self, of: datetime | date) -> str:
        """Return the month as `YYYY-MM`."""
        day = self.day_of(of) if isinstance(of, datetime) else of
        return f"{day.year:04d}-{day.month:02d}"

    def month_start(self, moment: datetime) -> datetime:
        """Return the start in UTC of the month of `moment`."""
        return self.day_start(self.day_of(moment).replace(day=1))

    def next_month_start(self, month: str) -> datetime:
        """Return the start in UTC of the month after `month` (`YYYY-MM`). Raises InvalidValue."""
        return self.day_start(first_day(next_month(month)))

    def _end_of_gap(self, near: datetime, day: date) -> datetime:
        """Return the first moment of `day` by bisection: across a gap at midnight the local date never goes backwards."""
        low, high = near - _ONE_DAY, near + _ONE_DAY
        while high - low > timedelta(microseconds=1):
            middle = low + (high - low) / 2
            if middle.astimezone(self._zone).date() < day:
                low = middle
            else:
                high = middle
        return high


def first_day(month: str, param: str = "month") -> date:
    """Return the first day of `YYYY-MM`. Raises InvalidValue, naming `param`."""
    if not re.fullmatch(MONTH_PATTERN, month):
        raise InvalidValue(f"{param} must be YYYY-MM", param=param)
    return date.fromisoformat(f"{month}-01")


def last_day(month: str) -> date:
    """Return the last day of `YYYY-MM`. Raises InvalidValue."""
    return first_day(next_month(month)) - _ONE_DAY


def next_month(month: str) -> str:
    """Return the month after `YYYY-MM`. Raises InvalidValue."""
    day = first_day(month)
    after = day.year * 12 + day.month
    if after // 12 > date.max.year:
        raise InvalidValue(f"{month} is the last supported month", param="month")
    return f"{after // 12:04d}-{after % 12 + 1:02d}"
