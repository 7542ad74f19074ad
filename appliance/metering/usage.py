"""Usage and cost reports from the rollups, and pages of the ledger. Reads only."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar, get_args

from sqlalchemy import ColumnElement, Select, and_, func, or_, select

from appliance.base.db import Database
from appliance.base.errors import InvalidValue, NotFound
from appliance.base.tables import usage_events
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.records import KINDS, Status, UsageEvent
from appliance.metering.ledger.rollups import join_sum, split_sum
from appliance.metering.ledger.rows import event_from_row, is_correction_of, is_kind
from appliance.metering.usage_queries import Measure, ReportScope, RowKey, page_query, report_query, totals_query
from appliance.metering.usage_segments import Segment, bucket_end, segments_from, split_period
from appliance.tenancy.access import Access
from appliance.tenancy.fields import check_choice
from appliance.tenancy.pages import PAGE_ROWS_DEFAULT, Page, check_limit, decode_cursor, from_micros, page_of, to_micros
from appliance.tenancy.roles import Action

BUCKETS = ("minute", "hour", "day")
GROUPS = ("tenant", "key", "model")
_GROUP_COLUMNS = {"tenant": "tenant_id", "key": "key_id", "model": "model"}
USAGE_ROWS_MAX = 50_000
T = TypeVar("T")
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """Sums over one bucket `start <= admitted_at < end`. Columns that the report does not group by are None."""

    start: datetime
    end: datetime
    tenant_id: str | None
    key_id: str | None
    model: str | None
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_picos: int
    currency: str
    rejected_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageFilter:
    """Filters of a usage report; None matches all."""

    tenant_ids: Collection[str] | None = None
    key_ids: Collection[str] | None = None
    models: Collection[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerFilter:
    """Filters of a page of the ledger; None matches all. `start <= admitted_at < end`."""

    tenant_id: str | None = None
    key_id: str | None = None
    model: str | None = None
    kind: str | None = None
    status: Status | None = None
    request_id: str | None = None
    start: datetime | None = None
    end: datetime | None = None


class UsageReports:
    """Reports over the ledger. Every method reads only what `access` may see."""

    def __init__(self, db: Database, *, calendar: BillingCalendar) -> None:
        self._db = db
        self.calendar = calendar

    async def usage(
        self,
        start: datetime,
        end: datetime,
        bucket: str = "day",
        group_by: Sequence[str] = (),
        filters: UsageFilter | None = None,
        *,
        rows_max: int | None = None,
        access: Access,
    ) -> list[UsageRow]:
        """Return the sums of posted and recovered events admitted in `start <= t < end`, per bucket and group.

        Buckets are minutes and hours of UTC, or days of the billing time zone; empty ones are left out. Amounts in different
        currencies are never added. Rows are in bucket order, at most `rows_max` of them (None: all). Raises InvalidValue for a
        bad query, and, without `rows_max`, for a report of more than USAGE_ROWS_MAX rows.
        """
        scope = _report_scope(group_by, filters, access)
        segments = self._segments(start, end, bucket)
        if not segments:
            return []
        if rows_max is None:
            query = report_query(segments, scope).limit(USAGE_ROWS_MAX + 1)
        else:
            query = page_query(segments, scope, rows_max, None)

        def build(found: Sequence[Any]) -> list[UsageRow]:
            if rows_max is None and len(found) > USAGE_ROWS_MAX:
                raise InvalidValue(f"the report has more than {USAGE_ROWS_MAX} rows; choose a larger bucket", param="bucket")
            return [row for row, _key in self._rows(found, scope, bucket)]

        return await self._read(query, build)

    async def usage_page(
        self,
        start: datetime,
        end: datetime,
        bucket: str = "day",
        group_by: Sequence[str] = (),
        filters: UsageFilter | None = None,
        *,
        limit: int = PAGE_ROWS_DEFAULT,
        cursor: str | None = None,
        access: Access,
    ) -> Page[UsageRow]:
        """Return a page of the report that `usage` returns. Also raises InvalidValue for a bad cursor.

        The cost of a page depends on its own rows, not on those before it. A cursor carries the period of its report, which
        replaces `start` and `end`; it is refused with another bucket, grouping or filter. Usage settled between two pages
        changes no row already returned: it counts in later rows if it belongs there, and no row is returned twice.
        """
        scope = _report_scope(group_by, filters, access)
        name = _cursor_name(bucket, scope)
        after = None
        if cursor is not None:
            start, end, after = _decode_report_cursor(name, cursor, scope)
        segments = self._segments(start, end, bucket)
        if after is not None:
            segments = segments_from(segments, after.start_at)
        rows_max = check_limit(limit) + 1
        if not segments:
            return Page(data=[], next_cursor=None)
        query = page_query(segments, scope, rows_max, after)
        rows = await self._read(query, lambda found: self._rows(found, scope, bucket))
        period = [to_micros(start), to_micros(end)]

        def position(row: tuple[UsageRow, RowKey]) -> list[str | int]:
            return [*period, to_micros(row[1].start_at), *row[1].names]

        page = page_of(rows, limit, name, position)
        return Page(data=[row for row, _key in page.data], next_cursor=page.next_cursor)

    async def _read(self, query: Select[Any], build: Callable[[Sequence[Any]], list[T]]) -> list[T]:
        """Return what `build` makes of the rows, in a thread: USAGE_ROWS_MAX of them would block the event loop for hundreds of
        milliseconds."""
        async with self._db.reading() as connection:
            result = await connection.execute(query)
            return await asyncio.to_thread(lambda: build(result.all()))

    def _segments(self, start: datetime, end: datetime, bucket: str) -> list[Segment]:
        check_choice(bucket, "bucket", BUCKETS)
        _check_period(start, end)
        return split_period(start, end, bucket, self.calendar)

    def _rows(self, found: Sequence[Any], scope: ReportScope, bucket: str) -> list[tuple[UsageRow, RowKey]]:
        """Return the rows of a report with their row keys."""
        ends = {start: bucket_end(start, bucket, self.calendar) for start in {row[0] for row in found}}
        columns = (*scope.key_columns, "currency")
        key_len = 1 + len(columns)
        return [
            (_usage_row(row[0], ends[row[0]], scope, columns, row[1:]), RowKey(row[0], tuple(row[1:key_len]))) for row in found
        ]

    async def totals(
        self,
        start: datetime,
        end: datetime,
        group_by: Sequence[str] = (),
        filters: UsageFilter | None = None,
        *,
        rows_max: int = USAGE_ROWS_MAX,
        measure: Measure = "cost",
        currency: str | None = None,
        access: Access,
    ) -> list[UsageRow]:
        """Return the sums over all of `start <= t < end` per group and currency, the largest in `measure` first.

        By cost, rows in `currency` come first, then the other currencies in turn.
        """
        scope = _report_scope(group_by, filters, access)
        segments = self._segments(start, end, "day")
        if not segments:
            return []
        query = totals_query(segments, scope, measure=measure, currency=currency).limit(rows_max)
        columns = (*scope.columns, "currency")
        return await self._read(query, lambda found: [_usage_row(start, end, scope, columns, row) for row in found])

    async def ledger_page(
        self,
        limit: int = PAGE_ROWS_DEFAULT,
        cursor: str | None = None,
        filters: LedgerFilter | None = None,
        *,
        newest_first: bool = False,
        access: Access,
    ) -> Page[UsageEvent]:
        """Return usage events in the order of opening, or in reverse. Raises InvalidValue for a bad cursor."""
        events = usage_events.c
        name = "ledger_newest" if newest_first else "ledger"
        order = events.id.desc() if newest_first else events.id
        query = access.narrow(select(events.id), events.tenant_id)
        query = query.where(*_ledger_conditions(filters or LedgerFilter())).order_by(order)
        if cursor is not None:
            (last_id,) = decode_cursor(name, cursor, [int])
            query = query.where(events.id < last_id if newest_first else events.id > last_id)
        # Select ids first: SQLite finds those of a tenant or key in an index, and reads whole rows only for the page.
        found = query.limit(check_limit(limit) + 1).subquery("found")
        shown = select(usage_events).join(found, events.id == found.c.id).order_by(order)
        async with self._db.reading() as connection:
            rows = (await connection.execute(shown)).mappings().all()
        return page_of([event_from_row(row) for row in rows], limit, name, lambda event: [event.id])

    async def event(self, request_id: str, *, access: Access) -> UsageEvent:
        """Return the usage event of a request. Raises NotFound, also for another tenant's request."""
        page = await self.ledger_page(1, None, LedgerFilter(request_id=request_id), access=access)
        if not page.data:
            raise NotFound("no such request", param="request_id")
        return page.data[0]

    async def correction_totals(self, event: UsageEvent, *, access: Access) -> tuple[int, int]:
        """Return the number of corrections of an event, and their signed cost in pico-units."""
        query = access.narrow(_corrections_of(event), usage_events.c.tenant_id)
        async with self._db.reading() as connection:
            number, high, low = (await connection.execute(query)).one()
        return number, join_sum(high, low)


def _check_period(start: datetime, end: datetime) -> None:
    for name, moment in (("start", start), ("end", end)):
        if moment.tzinfo is None:
            raise InvalidValue(f"{name} must have a zone", param=name)
    if start >= end:
        raise InvalidValue("end must be later than start", param="end")


def _report_scope(group_by: Sequence[str], filters: UsageFilter | None, access: Access) -> ReportScope:
    """Return the grouping and filters of a report, limited to the tenants that `access` may see."""
    for name in group_by:
        check_choice(name, "group_by", GROUPS)
    filters = filters or UsageFilter()
    tenants, visible = filters.tenant_ids, access.within(Action.READ)
    if visible is not None:
        tenants = visible if tenants is None else visible & set(tenants)
    by_column = {"tenant_id": tenants, "key_id": filters.key_ids, "model": filters.models}
    return ReportScope(
        columns=tuple(_GROUP_COLUMNS[name] for name in GROUPS if name in group_by),
        filters={name: set(values) for name, values in by_column.items() if values is not None},
    )


def _cursor_name(bucket: str, scope: ReportScope) -> str:
    """Return the name that cursors of a report carry: a digest of its query without the period."""
    query = [bucket, scope.columns, {column: sorted(values) for column, values in sorted(scope.filters.items())}]
    return "usage/" + hashlib.sha256(json.dumps(query).encode()).hexdigest()[:16]


def _decode_report_cursor(name: str, cursor: str, scope: ReportScope) -> tuple[datetime, datetime, RowKey]:
    """Return the period of the cursor's report, and the row key after which it continues."""
    start, end, bucket_at, *names = decode_cursor(name, cursor, [int, int, int, *(str for _ in scope.key_columns), str])
    if start >= end:
        raise InvalidValue("cursor does not belong to this list", param="cursor")
    return from_micros(start), from_micros(end), RowKey(from_micros(bucket_at), tuple(names))


def _usage_row(start: datetime, end: datetime, scope: ReportScope, columns: Sequence[str], values: Sequence[Any]) -> UsageRow:
    """Build a row from `values`: those of `columns`, then those of COUNTS, which PostgreSQL returns as decimals."""
    by_column = dict(zip(columns, values[: len(columns)], strict=True))
    requests, prompt, cached, completion, rejected, cost_high, cost_low = map(int, values[len(columns) :])
    group = {name: by_column[name] for name in scope.columns}
    return UsageRow(
        start=start,
        end=end,
        tenant_id=group.get("tenant_id"),
        key_id=group.get("key_id"),
        model=group.get("model"),
        requests=requests,
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        rejected_tokens=rejected,
        cost_picos=join_sum(cost_high, cost_low),
        currency=by_column["currency"],
    )


def _ledger_conditions(filters: LedgerFilter) -> list[ColumnElement[bool]]:
    events = usage_events.c
    if filters.status is not None:
        check_choice(filters.status, "status", STATUSES)
    if filters.kind is not None:
        check_choice(filters.kind, "kind", KINDS)
    equal = {
        events.tenant_id: filters.tenant_id,
        events.key_id: filters.key_id,
        events.model: filters.model,
        events.status: filters.status,
    }
    conditions: list[ColumnElement[bool]] = [column == value for column, value in equal.items() if value is not None]
    if filters.kind is not None:
        conditions.append(is_kind(filters.kind))
    if filters.request_id is not None:
        of_request = events.request_id == filters.request_id
        conditions.append(or_(*(and_(is_kind(kind), of_request) for kind in KINDS)))
    if filters.start is not None:
        conditions.append(events.admitted_at >= filters.start)
    if filters.end is not None:
        conditions.append(events.admitted_at < filters.end)
    return conditions


def _corrections_of(event: UsageEvent) -> Select[Any]:
    """Return the query for the number of corrections of an event, and their cost as a split sum."""
    events = usage_events.c
    sums: list[Any] = [func.count(), *split_sum(events.cost_picos)]
    return select(*sums).where(is_correction_of(event.id, event.request_id))
