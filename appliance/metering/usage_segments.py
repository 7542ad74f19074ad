"""Splits a period into segments that rollups of different sizes cover exactly. Pure.

    start                                                                        end
      ├events┤minutes├─ hours ─┤──────────── days ────────────┤─ hours ─┤minutes├events┤

Whole buckets of the report come from rollups of the same size; buckets cut by the ends of the period come from finer rollups,
down to single events within a minute.
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
STARTS_MAX = 100  # the most start times that a query lists: the days of three months, the hours of four days
_FINER = {DAY: HOUR, HOUR: MINUTE, MINUTE: EVENT}
_SIZES = {HOUR: timedelta(hours=1), MINUTE: timedelta(minutes=1)}
_TICK = timedelta(microseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a period, read from rollups of one `level`, or from events. `report_bucket` is the start of the report's bucket
    that contains it; None if its rollups are whole buckets of the report. `starts` are the start times of its rollups, empty
    if there are too many."""

    level: str
    start: datetime
    end: datetime
    report_bucket: datetime | None
    starts: tuple[datetime, ...] = ()


def split_period(start: datetime, end: datetime, bucket: str, calendar: BillingCalendar) -> list[Segment]:
    """Return the segments of `start <= t < end`, in order and without gaps; none if the period is empty."""
    start, end = max(start, EARLIEST), min(end, LATEST)
    segments = _split(start, end, bucket, calendar)
    return [
        Segment(
            level=level,
            start=begin,
            end=stop,
            report_bucket=None if level == bucket else bucket_start(begin, bucket, calendar),
            starts=_starts(level, begin, stop, calendar),
        )
        for level, begin, stop in segments
    ]


def segments_from(segments: Iterable[Segment], bucket_at: datetime) -> list[Segment]:
    """Return the segments that may overlap the bucket beginning at `bucket_at`, or a later one."""
    last = [(segment, segment.end - _TICK if segment.report_bucket is None else segment.report_bucket) for segment in segments]
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


def _split(start: datetime, end: datetime, level: str, calendar: BillingCalendar) -> list[tuple[str, datetime, datetime]]:
    if start >= end:
        return []
    if level == EVENT:
        return [(EVENT, start, end)]
    first, last = bucket_start(start, level, calendar), bucket_start(end, level, calendar)
    if first < start:
        first = bucket_end(first, level, calendar)
    finer = _FINER[level]
    if first > last:
        return _split(start, end, finer, calendar)
    whole = [(level, first, last)] if first < last else []
    return _split(start, first, finer, calendar) + whole + _split(last, end, finer, calendar)
