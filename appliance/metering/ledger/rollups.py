"""Rollups: sums of billed events by minute, hour and day, updated in the settling transaction and rebuilt on demand.

    minute, hour   of UTC
    day            of the billing time zone

All three go by the time of admission. So a report may add whole days to minutes and single events at its ends, also after the
time zone was changed, when events keep the billing day that they had. Voided and pending events are in no sum; an adjustment
adds its signed counts and no request. At each level an event is added to one row of its owner (tenant, key, model, currency)
and to one row of the whole appliance (model, currency). The latter have a table of their own and are the sums of the owners'
rows. Knows no reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from operator import add as add_integers
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    DateTime,
    Insert,
    Select,
    Table,
    case,
    delete,
    except_,
    func,
    insert,
    literal,
    literal_column,
    select,
    type_coerce,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base import counters
from appliance.base.batches import batched
from appliance.base.db import Database, insert_for
from appliance.base.prepared import Prepared
from appliance.base.tables import UtcDateTime, usage_appliance_rollups, usage_events, usage_rollups
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.records import BILLED, TOKEN_COLUMNS, UsageEvent

MINUTE, HOUR, DAY = "minute", "hour", "day"
LEVELS = (MINUTE, HOUR, DAY)
SPLIT = 10**9
KEYS = ("bucket", "start_at", "tenant_id", "key_id", "model", "currency")
KEYS_OVER_TENANTS = ("bucket", "start_at", "model", "currency")
COUNTS = ("requests", *TOKEN_COLUMNS, "cost_high", "cost_low")
_OWNERS = ("tenant_id", "key_id", "model", "currency")
_INSERT_ROWS = 5000


def _upserts(table: Table, keys: Sequence[str]) -> dict[str, Prepared]:
    """Return, by dialect, the statement that adds counts to the rows with these `keys`."""
    return {kind: Prepared(_upsert(kind, table, keys)) for kind in ("sqlite", "postgresql")}


def _upsert(kind: str, table: Table, keys: Sequence[str]) -> Insert:
    statement = insert_for(kind, table)
    added = {name: table.c[name] + statement.excluded[name] for name in COUNTS}
    upsert: Insert = statement.on_conflict_do_update(index_elements=list(keys), set_=added)
    return upsert


_ADD = _upserts(usage_rollups, KEYS)
_ADD_OVER_TENANTS = _upserts(usage_appliance_rollups, KEYS_OVER_TENANTS)


def add(connection: Connection, calendar: BillingCalendar, events: Iterable[UsageEvent]) -> None:
    """Add newly settled events to their sums.

    The caller must hold the lock of the posting counter, so that transactions cannot deadlock on each other's rows.
    """
    rows = sum_rows(events, calendar)
    if rows:
        _ADD[connection.dialect.name].execute(connection, rows)
        _ADD_OVER_TENANTS[connection.dialect.name].execute(connection, _rows_over_tenants(rows))


async def mismatched_levels(connection: AsyncConnection, kind: str, calendar: BillingCalendar) -> list[str]:
    """Return the levels at which the stored sums differ from the events, both as seen by this connection."""
    wrong = {bucket for bucket in (MINUTE, HOUR) if await _differs(connection, kind, bucket)}
    days = await _days(connection, calendar)
    stored = (await connection.execute(_stored(DAY))).mappings().all()
    if sorted(map(_comparable, days)) != sorted(map(_comparable, stored)):
        wrong.add(DAY)
    wrong |= {bucket for bucket in LEVELS if await _differs_over_tenants(connection, bucket)}
    return [bucket for bucket in LEVELS if bucket in wrong]


def sum_rows(events: Iterable[UsageEvent], calendar: BillingCalendar) -> list[dict[str, Any]]:
    """Return the owners' rollup rows for these events."""
    by_minute: dict[tuple[Any, ...], list[int]] = {}
    for event in events:
        if event.status in BILLED:
            minute = event.admitted_at.replace(second=0, microsecond=0)
            key = (minute, event.tenant_id, event.key_id, event.model, event.currency)
            _add_to(by_minute, key, _counts(event))
    sums: dict[tuple[Any, ...], list[int]] = {}
    for (minute, *owner), counts in by_minute.items():
        for bucket, start_at in _bucket_starts(minute, calendar):
            _add_to(sums, (bucket, start_at, *owner), counts)
    return [dict(zip((*KEYS, *COUNTS), (*key, *row), strict=True)) for key, row in sums.items()]


def _rows_over_tenants(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the owners' rows summed for the whole appliance."""
    sums: dict[tuple[Any, ...], list[int]] = {}
    for row in rows:
        _add_to(sums, tuple(row[name] for name in KEYS_OVER_TENANTS), [row[name] for name in COUNTS])
    return [dict(zip((*KEYS_OVER_TENANTS, *COUNTS), (*key, *counts), strict=True)) for key, counts in sums.items()]


def _counts(event: UsageEvent) -> list[int]:
    """Return the event's contribution to each of COUNTS."""
    high, low = split_cost(event.cost_picos)
    return [int(event.kind == "usage"), *(getattr(event, name) for name in TOKEN_COLUMNS), high, low]


def _add_to(sums: dict[tuple[Any, ...], list[int]], key: tuple[Any, ...], counts: list[int]) -> None:
    present = sums.get(key)
    sums[key] = counts if present is None else list(map(add_integers, present, counts))


def split_cost(cost_picos: int) -> tuple[int, int]:
    """Return the two stored halves of a cost; both have its sign, as division and modulo give in both databases."""
    high, low = divmod(abs(cost_picos), SPLIT)
    return (high, low) if cost_picos >= 0 else (-high, -low)


async def models_used_since(connection: AsyncConnection, moment: datetime) -> list[tuple[str, str]]:
    """Return the (model, currency) pairs with usage on days that begin at or after `moment`."""
    days = usage_appliance_rollups.c
    query = select(days.model, days.currency).where(days.bucket == DAY, days.start_at >= moment).distinct()
    return [(model, currency) for model, currency in (await connection.execute(query)).all()]


async def rebuild(db: Database, calendar: BillingCalendar) -> int:
    """Rebuild all sums from the events, and return the number of owners' rows. Blocks settlements meanwhile."""
    async with db.writing() as connection:
        await counters.lock(connection, counters.POSTING)
        await connection.execute(delete(usage_rollups))
        await connection.execute(delete(usage_appliance_rollups))
        for bucket in (MINUTE, HOUR):
            # In order of time, as originally written, so that rows read by one report are stored close together.
            query = _summed(bucket, floor_of(db.kind, usage_events.c.admitted_at, bucket)).order_by(literal_column("start_at"))
            await connection.execute(insert(usage_rollups).from_select([*KEYS, *COUNTS], query))
        await _insert_days(connection, calendar)
        await _insert_over_tenants(connection, LEVELS)
        return int((await connection.execute(select(func.count()).select_from(usage_rollups))).scalar_one())


async def align_days(db: Database, calendar: BillingCalendar) -> bool:
    """Rebuild the daily sums if they were made in another time zone, and return whether they were."""
    days = select(usage_rollups.c.start_at).where(usage_rollups.c.bucket == DAY).distinct()
    async with db.reading() as connection:
        starts = (await connection.execute(days)).scalars().all()
    if all(calendar.day_start(start) == start for start in starts):
        return False
    async with db.writing() as connection:
        await counters.lock(connection, counters.POSTING)
        for table in (usage_rollups, usage_appliance_rollups):
            await connection.execute(delete(table).where(table.c.bucket == DAY))
        await _insert_days(connection, calendar)
        await _insert_over_tenants(connection, [DAY])
    return True


def event_counts() -> list[ColumnElement[Any]]:
    """Return the sums of COUNTS as columns, for a query over billed events."""
    events = usage_events.c
    return [
        func.sum(case((events.kind == "usage", 1), else_=0)).label("requests"),
        *(func.sum(events[name]).label(name) for name in TOKEN_COLUMNS),
        func.sum(events.cost_picos // SPLIT).label("cost_high"),
        func.sum(events.cost_picos % SPLIT).label("cost_low"),
    ]


def _summed(bucket: str, start: ColumnElement[Any]) -> Select[Any]:
    query = select(literal(bucket).label("bucket"), start.label("start_at"), *_owner_columns(), *event_counts())
    # Grouped by the label: PostgreSQL does not recognise two expressions with parameters as equal.
    return query.where(usage_events.c.status.in_(BILLED)).group_by(literal_column("start_at"), *_owner_columns())


def floor_of(kind: str, moment: ColumnElement[Any], bucket: str) -> ColumnElement[Any]:
    """Return the column expression for the start of the UTC minute or hour that contains `moment`."""
    if kind == "sqlite":
        chars, rest = (16, ":00.000000") if bucket == MINUTE else (13, ":00:00.000000")
        return type_coerce(func.substr(moment, 1, chars).op("||")(literal(rest)), UtcDateTime())
    floor = func.timezone("UTC", func.date_trunc(bucket, func.timezone("UTC", moment), type_=DateTime()))
    return type_coerce(floor, UtcDateTime())


async def _differs(connection: AsyncConnection, kind: str, bucket: str) -> bool:
    return await _rows_differ(connection, _summed(bucket, floor_of(kind, usage_events.c.admitted_at, bucket)), _stored(bucket))


def _stored(bucket: str) -> Select[Any]:
    return select(*(usage_rollups.c[name] for name in (*KEYS, *COUNTS))).where(usage_rollups.c.bucket == bucket)


async def _differs_over_tenants(connection: AsyncConnection, bucket: str) -> bool:
    stored = select(*(usage_appliance_rollups.c[name] for name in (*KEYS_OVER_TENANTS, *COUNTS))).where(
        usage_appliance_rollups.c.bucket == bucket
    )
    return await _rows_differ(connection, _summed_over_tenants(bucket), stored)


async def _rows_differ(connection: AsyncConnection, one: Select[Any], other: Select[Any]) -> bool:
    """Return whether the rows of the two queries differ."""
    for left, right in ((one, other), (other, one)):
        if (await connection.execute(except_(left, right).limit(1))).first() is not None:
            return True
    return False


def _summed_over_tenants(bucket: str) -> Select[Any]:
    keys = [usage_rollups.c[name] for name in KEYS_OVER_TENANTS]
    sums = [func.sum(usage_rollups.c[name]).label(name) for name in COUNTS]
    return select(*keys, *sums).where(usage_rollups.c.bucket == bucket).group_by(*keys)


def _comparable(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in (*KEYS, *COUNTS))


async def _days(connection: AsyncConnection, calendar: BillingCalendar) -> list[dict[str, Any]]:
    """Return the owners' rows by day, from the events. Only Python knows time zones, so each day is a query of its own."""
    admitted_at = usage_events.c.admitted_at
    first = select(func.min(admitted_at))
    rows: list[dict[str, Any]] = []
    moment = (await connection.execute(first)).scalar_one()
    while moment is not None:
        start, end = calendar.day_start(moment), calendar.next_day_start(moment)
        of_day = _summed(DAY, literal(start, UtcDateTime())).where(admitted_at >= start, admitted_at < end)
        found = (await connection.execute(of_day)).mappings().all()
        rows += [{**row, **{name: int(row[name]) for name in COUNTS}} for row in found]
        moment = (await connection.execute(first.where(admitted_at >= end))).scalar_one()
    return rows


async def _insert_days(connection: AsyncConnection, calendar: BillingCalendar) -> None:
    for rows in batched(await _days(connection, calendar), _INSERT_ROWS):
        await connection.execute(insert(usage_rollups), rows)


async def _insert_over_tenants(connection: AsyncConnection, levels: Iterable[str]) -> None:
    for bucket in levels:
        query = _summed_over_tenants(bucket).order_by(*(usage_rollups.c[name] for name in KEYS_OVER_TENANTS))
        await connection.execute(insert(usage_appliance_rollups).from_select([*KEYS_OVER_TENANTS, *COUNTS], query))


def _bucket_starts(minute: datetime, calendar: BillingCalendar) -> Sequence[tuple[str, datetime]]:
    return ((MINUTE, minute), (HOUR, minute.replace(minute=0)), (DAY, calendar.day_start(minute)))


def _owner_columns() -> list[ColumnElement[Any]]:
    return [usage_events.c[name] for name in _OWNERS]


def split_sum(column: ColumnElement[int]) -> tuple[ColumnElement[int], ColumnElement[int]]:
    """Return the sums of the two halves of `column`: SQLite's SUM of the whole values fails beyond 64 bits."""
    return func.coalesce(func.sum(column // SPLIT), 0), func.coalesce(func.sum(column % SPLIT), 0)


def join_sum(high: int, low: int) -> int:
    """Return the exact sum from its two halves."""
    return int(high) * SPLIT + int(low)
