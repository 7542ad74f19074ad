"""Which sums together cover a period exactly, and the one query that adds them up. Knows no HTTP and runs nothing.

    start                                                                        end
      ├events┤minutes├─ hours ─┤──────────── days ────────────┤─ hours ─┤minutes├events┤

Whole buckets of the report come from sums of their own size; what the period cuts at its ends comes from finer ones, down to
single events within a minute. However long the period, it is one statement.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Select, Table, func, literal, select, union_all

from appliance.base.tables import UtcDateTime, usage_events, usage_rollups
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.rollups import COUNTS, DAY, HOUR, MINUTE, SETTLED, event_counts

EVENT = "event"
EARLIEST = datetime(1970, 1, 2, tzinfo=UTC)
LATEST = datetime(9990, 1, 1, tzinfo=UTC)
_FINER = {DAY: HOUR, HOUR: MINUTE, MINUTE: EVENT}
_SIZES = {HOUR: timedelta(hours=1), MINUTE: timedelta(minutes=1)}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a period, covered by sums of one `level`, or by events. `within` is the bucket of the report that it lies in;
    None where its sums are buckets of the report themselves."""

    level: str
    start: datetime
    end: datetime
    within: datetime | None


def cover(start: datetime, end: datetime, bucket: str, calendar: BillingCalendar) -> list[Segment]:
    """Return the segments of `start <= t < end`, in order and without gaps; none where the period is empty."""
    start, end = max(start, EARLIEST), min(end, LATEST)
    segments = _cover(start, end, bucket, calendar)
    return [
        Segment(level=level, start=a, end=b, within=None if level == bucket else bucket_start(a, bucket, calendar))
        for level, a, b in segments
    ]


def bucket_start(moment: datetime, bucket: str, calendar: BillingCalendar) -> datetime:
    """Return the beginning of the bucket that `moment` lies in."""
    if bucket == DAY:
        return calendar.day_start(moment)
    return moment - (moment - _EPOCH) % _SIZES[bucket]


def bucket_end(start: datetime, bucket: str, calendar: BillingCalendar) -> datetime:
    """Return the end of the bucket that begins at `start`."""
    return calendar.next_day_start(start) if bucket == DAY else start + _SIZES[bucket]


def usage_query(segments: Sequence[Segment], groups: Sequence[str], wanted: Mapping[str, Collection[str]]) -> Select[Any]:
    """Return the query for sums per bucket, group and currency, in that order.

    `groups` are columns of the owner; `wanted` says which values of such a column count, where not all do.
    """
    parts = union_all(*(_part(segment, groups, wanted) for segment in segments)).subquery("parts")
    keys = [parts.c.start_at, *(parts.c[name] for name in groups), parts.c.currency]
    sums = [func.sum(parts.c[name]).label(name) for name in COUNTS]
    return select(*keys, *sums).group_by(*keys).order_by(*keys)


def totals_query(segments: Sequence[Segment], groups: Sequence[str], wanted: Mapping[str, Collection[str]]) -> Select[Any]:
    """Return the query for sums over all segments per group and currency, the dearest first, then the largest."""
    parts = union_all(*(_part(segment, groups, wanted) for segment in segments)).subquery("parts")
    keys = [*(parts.c[name] for name in groups), parts.c.currency]
    sums = {name: func.sum(parts.c[name]).label(name) for name in COUNTS}
    order = [sums["cost_high"].desc(), sums["completion_tokens"].desc(), *keys]
    return select(*keys, *sums.values()).group_by(*keys).order_by(*order)


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


def _part(segment: Segment, groups: Sequence[str], wanted: Mapping[str, Collection[str]]) -> Select[Any]:
    if segment.level == EVENT:
        table: Table = usage_events
        moment: ColumnElement[Any] = usage_events.c.admitted_at
        counts = event_counts()
        belongs: ColumnElement[bool] = usage_events.c.status.in_(SETTLED)
    else:
        table, moment = usage_rollups, usage_rollups.c.start_at
        counts = [func.sum(usage_rollups.c[name]).label(name) for name in COUNTS]
        belongs = usage_rollups.c.bucket == segment.level
    start = moment if segment.within is None else literal(segment.within, UtcDateTime())
    keys = [table.c[name] for name in (*groups, "currency")]
    inside: list[ColumnElement[bool]] = [belongs, moment >= segment.start, moment < segment.end]
    inside += [table.c[name].in_(sorted(values)) for name, values in wanted.items()]
    query = select(start.label("start_at"), *keys, *counts).where(*inside)
    return query.group_by(*([moment] if segment.within is None else []), *keys)
