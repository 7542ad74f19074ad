"""Which sums together cover a period exactly. Knows no HTTP and reads nothing.

    start                                                                        end
      ├events┤minutes├─ hours ─┤──────────── days ────────────┤─ hours ─┤minutes├events┤

Whole buckets of the report come from sums of the same size; buckets that the ends of the period cut come from finer sums, down
to single events within a minute.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.rollups import DAY, HOUR, MINUTE

EVENT = "event"
EARLIEST = datetime(1970, 1, 2, tzinfo=UTC)
LATEST = datetime(9990, 1, 1, tzinfo=UTC)
STARTS_MAX = 100  # the days of three months, the hours of four days: the most that a statement lists
_FINER = {DAY: HOUR, HOUR: MINUTE, MINUTE: EVENT}
_SIZES = {HOUR: timedelta(hours=1), MINUTE: timedelta(minutes=1)}
_TICK = timedelta(microseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a period, covered by sums of one `level`, or by events. `within` is the bucket of the report that contains it;
    None if its sums are themselves buckets of the report. `starts` are the beginnings of the sums, empty if too many."""

    level: str
    start: datetime
    end: datetime
    within: datetime | None
    starts: tuple[datetime, ...] = ()


def cover(start: datetime, end: datetime, bucket: str, calendar: BillingCalendar) -> list[Segment]:
    """Return the segments of `start <= t < end`, in order and without gaps; none where the period is empty."""
    start, end = max(start, EARLIEST), min(end, LATEST)
    segments = _cover(start, end, bucket, calendar)
    return [
        Segment(
            level=level,
            start=a,
            end=b,
            within=None if level == bucket else bucket_start(a, bucket, calendar),
            starts=_starts(level, a, b, calendar),
        )
        for level, a, b in segments
    ]


def reaching(segments: Iterable[Segment], bucket_at: datetime) -> list[Segment]:
    """Return the segments that may contain a part of the bucket beginning at `bucket_at`, or of a later one."""
    last = [(segment, segment.end - _TICK if segment.within is None else segment.within) for segment in segments]
    return [segment for segment, latest in last if latest >= bucket_at]


def _starts(level: str, start: datetime, end: datetime, calendar: BillingCalendar) -> tuple[datetime, ...]:
    if level == EVENT or end - start > STARTS_MAX * _SIZES.get(level, timedelta(days=1)):
        return ()
    starts = []
    while start < end:
        starts.append(start)
        start = bucket_end(start, level, calendar)
    return tuple(starts)


def bucket_start(moment: datetime, bucket: str, calendar: BillingCalendar) -> datetime:
    """Return the beginning of the bucket that contains `moment`."""
    if bucket == DAY:
        return calendar.day_start(moment)
    return moment - (moment - _EPOCH) % _SIZES[bucket]


def bucket_end(start: datetime, bucket: str, calendar: BillingCalendar) -> datetime:
    """Return the end of the bucket that begins at `start`."""
    return calendar.next_day_start(start) if bucket == DAY else start + _SIZES[bucket]


def _cover(start: datetime, end: datetime, level: str, calendar: BillingCalendar) -> list[tuple[str, datetime, datetime]]:
    if start >= end:
        return []
    if level == EVENT:
        return [(EVENT, start, end)]
    first, last = bucket_start(start, level, calendar), bucket_start(end, level, calendar)
    if first < start:
        first = bucket_end(first, level, calendar)
    finer = _FINER[level]
    if first > last:
        return _cover(start, end, finer, calendar)
    whole = [(level, first, last)] if first < last else []
    return _cover(start, first, finer, calendar) + whole + _cover(last, end, finer, calendar)
