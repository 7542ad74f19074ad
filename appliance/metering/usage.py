"""What was used and what it cost: reports over the sums, and the pages of ledger and requests. Reads only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from sqlalchemy import ColumnElement, and_, or_, select

from appliance.base.db import Database
from appliance.base.errors import InvalidValue, NotFound
from appliance.base.tables import api_keys, requests, usage_events
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.records import RequestRow, Status, UsageEvent
from appliance.metering.ledger.rollups import SPLIT, TOKENS
from appliance.metering.ledger.rows import event_from_row, request_from_row
from appliance.metering.usage_cover import bucket_end, cover, totals_query, usage_query
from appliance.tenancy.access import WHOLE_BOX, Access
from appliance.tenancy.fields import check_choice
from appliance.tenancy.pages import PAGE_ROWS_DEFAULT, Page, check_limit, decode_cursor, page_of
from appliance.tenancy.roles import Action

Bucket = Literal["minute", "hour", "day"]
BUCKETS = ("minute", "hour", "day")
GROUPS = ("tenant", "key", "model")
_GROUP_COLUMNS = {"tenant": "tenant_id", "key": "key_id", "model": "model"}
USAGE_ROWS_MAX = 50_000
STATUSES = ("pending", "posted", "voided", "recovered")
KINDS = ("usage", "adjustment")
_MICROS_PER_S = 1_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """Sums of one bucket `start <= admitted_at < end`; what was not grouped by is None."""

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
class LedgerFilter:
    """Which events a page of the ledger shows; None is all. `start <= admitted_at < end`."""

    tenant_id: str | None = None
    key_id: str | None = None
    model: str | None = None
    kind: str | None = None
    status: Status | None = None
    request_id: str | None = None
    start: datetime | None = None
    end: datetime | None = None


class UsageReports:
    """Reports over the ledger and the table of requests. Every method narrows what it reads to what `access` shows."""

    def __init__(self, db: Database, *, calendar: BillingCalendar | None = None) -> None:
        self._db = db
        self.calendar = calendar or BillingCalendar()

    async def usage(
        self,
        start: datetime,
        end: datetime,
        bucket: str = "day",
        group_by: Sequence[str] = (),
        tenant_id: str | None = None,
        *,
        key_ids: Collection[str] | None = None,
        models: Collection[str] | None = None,
        tenant_ids: Collection[str] | None = None,
        part: slice | None = None,
        access: Access = WHOLE_BOX,
    ) -> list[UsageRow]:
        """Return the sums of posted and recovered events admitted in `start <= t < end`, per bucket and group.

        Buckets begin at whole minutes and hours of UTC, or with days of the billing time zone; empty ones are left out. Amounts
        of different currencies are never added. `tenant_ids`, `key_ids` and `models` leave out all others; None is all.
        `part` are the rows `start` to `stop` of the report, which is then as long as it likes; whole, it raises InvalidValue
        beyond USAGE_ROWS_MAX rows, as it does for what cannot be asked.
        """
        check_choice(bucket, "bucket", BUCKETS)
        _check_period(start, end)
        groups = _check_groups(group_by)
        segments = cover(start, end, bucket, self.calendar)
        if not segments:
            return []
        wanted = _wanted([None if tenant_id is None else {tenant_id}, tenant_ids, access.within(Action.READ)], key_ids, models)
        begin, stop = (0, USAGE_ROWS_MAX + 1) if part is None else (part.start, part.stop)
        query = usage_query(segments, [_GROUP_COLUMNS[name] for name in groups], wanted).limit(stop - begin).offset(begin)
        async with self._db.reading() as connection:
            rows = (await connection.execute(query)).mappings().all()
        if part is None and len(rows) > USAGE_ROWS_MAX:
            raise InvalidValue(f"the report has more than {USAGE_ROWS_MAX} rows; choose a larger bucket", param="bucket")
        return [_usage_row(row, bucket_end(row["start_at"], bucket, self.calendar)) for row in rows]

    async def totals(
        self,
        start: datetime,
        end: datetime,
        group_by: Sequence[str] = (),
        tenant_id: str | None = None,
        *,
        rows_max: int = USAGE_ROWS_MAX,
        access: Access = WHOLE_BOX,
    ) -> list[UsageRow]:
        """Return the sums over the whole of `start <= t < end` per group and currency, the dearest first."""
        _check_period(start, end)
        groups = _check_groups(group_by)
        segments = cover(start, end, "day", self.calendar)
        if not segments:
            return []
        wanted = _wanted([None if tenant_id is None else {tenant_id}, access.within(Action.READ)], None, None)
        query = totals_query(segments, [_GROUP_COLUMNS[name] for name in groups], wanted).limit(rows_max)
        async with self._db.reading() as connection:
            rows = (await connection.execute(query)).mappings().all()
        return [_usage_row({**row, "start_at": start}, end) for row in rows]

    async def ledger_page(
        self,
        limit: int = PAGE_ROWS_DEFAULT,
        cursor: str | None = None,
        filters: LedgerFilter | None = None,
        *,
        newest_first: bool = False,
        access: Access,
    ) -> Page[UsageEvent]:
        """Return usage events in the order they were opened (or the reverse). Raises InvalidValue for a bad cursor."""
        events = usage_events.c
        name = "ledger_newest" if newest_first else "ledger"
        order = events.id.desc() if newest_first else events.id
        query = access.narrow(select(usage_events), events.tenant_id)
        query = query.where(*_ledger_conditions(filters or LedgerFilter())).order_by(order)
        if cursor is not None:
            (last_id,) = decode_cursor(name, cursor, [int])
            query = query.where(events.id < last_id if newest_first else events.id > last_id)
        async with self._db.reading() as connection:
            rows = (await connection.execute(query.limit(check_limit(limit) + 1))).mappings().all()
        return page_of([event_from_row(row) for row in rows], limit, name, lambda event: [event.id])

    async def event(self, request_id: str, tenant_id: str | None = None, *, access: Access) -> UsageEvent:
        """Return the usage event of a request. Raises NotFound, also for another tenant's."""
        filters = LedgerFilter(request_id=request_id, tenant_id=tenant_id)
        page = await self.ledger_page(1, None, filters, access=access)
        if not page.data:
            raise NotFound("no such request", param="request_id")
        return page.data[0]

    async def requests_page(
        self,
        limit: int = PAGE_ROWS_DEFAULT,
        cursor: str | None = None,
        tenant_id: str | None = None,
        *,
        key_id: str | None = None,
        model: str | None = None,
        finish_reason: str | None = None,
        text: str | None = None,
        finished_only: bool = True,
        access: Access,
    ) -> Page[RequestRow]:
        """Return past requests, the newest first. Raises InvalidValue for a bad cursor.

        `text` is looked for, in any case, in the request's id, its model, and its key's name and prefix.
        """
        columns = requests.c
        query = access.narrow(select(requests), columns.tenant_id)
        query = query.order_by(columns.admitted_at.desc(), columns.id.desc())
        wanted = {
            columns.tenant_id: tenant_id,
            columns.key_id: key_id,
            columns.model: model,
            columns.finish_reason: finish_reason,
        }
        query = query.where(*(column == value for column, value in wanted.items() if value is not None))
        if text:
            query = query.where(_mentions(text))
        if finished_only:
            query = query.where(columns.finished_at.is_not(None))
        if cursor is not None:
            micros, last_id = decode_cursor("requests", cursor, [int, str])
            moment = _from_micros(micros)
            earlier = or_(columns.admitted_at < moment, and_(columns.admitted_at == moment, columns.id < last_id))
            query = query.where(columns.admitted_at <= moment, earlier)
        async with self._db.reading() as connection:
            rows = (await connection.execute(query.limit(check_limit(limit) + 1))).mappings().all()
        found = [request_from_row(row) for row in rows]
        return page_of(found, limit, "requests", lambda row: [_to_micros(row.admitted_at), row.id])

    async def request(self, request_id: str, tenant_id: str | None = None, *, access: Access) -> RequestRow:
        """Return a request. Raises NotFound, also for another tenant's."""
        query = access.narrow(select(requests), requests.c.tenant_id).where(requests.c.id == request_id)
        if tenant_id is not None:
            query = query.where(requests.c.tenant_id == tenant_id)
        async with self._db.reading() as connection:
            row = (await connection.execute(query)).mappings().first()
        if row is None:
            raise NotFound("no such request", param="request_id")
        return request_from_row(row)


def _check_groups(group_by: Sequence[str]) -> tuple[str, ...]:
    for name in group_by:
        check_choice(name, "group_by", GROUPS)
    return tuple(name for name in GROUPS if name in group_by)


def _check_period(start: datetime, end: datetime) -> None:
    for name, moment in (("start", start), ("end", end)):
        if moment.tzinfo is None:
            raise InvalidValue(f"{name} must have a zone", param=name)
    if start >= end:
        raise InvalidValue("end must be later than start", param="end")


def _wanted(
    tenant_ids: Sequence[Collection[str] | None], key_ids: Collection[str] | None, models: Collection[str] | None
) -> Mapping[str, Collection[str]]:
    """Return the values that count of each column that is narrowed; a tenant must be asked for and visible."""
    narrowing = [set(ids) for ids in tenant_ids if ids is not None]
    tenants = set.intersection(*narrowing) if narrowing else None
    narrowed = {"tenant_id": tenants, "key_id": key_ids, "model": models}
    return {name: values for name, values in narrowed.items() if values is not None}


def _usage_row(row: Any, end: datetime) -> UsageRow:
    return UsageRow(
        start=row["start_at"],
        end=end,
        tenant_id=row.get("tenant_id"),
        key_id=row.get("key_id"),
        model=row.get("model"),
        requests=int(row["requests"]),
        **{name: int(row[name]) for name in TOKENS},
        cost_picos=int(row["cost_high"]) * SPLIT + int(row["cost_low"]),
        currency=row["currency"],
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
        events.kind: filters.kind,
        events.status: filters.status,
        events.request_id: filters.request_id,
    }
    conditions: list[ColumnElement[bool]] = [column == value for column, value in equal.items() if value is not None]
    if filters.start is not None:
        conditions.append(events.admitted_at >= filters.start)
    if filters.end is not None:
        conditions.append(events.admitted_at < filters.end)
    return conditions


def _mentions(text: str) -> ColumnElement[bool]:
    """Return the condition that a request has `text` somewhere in what names it."""
    columns = (requests.c.id, requests.c.model)
    keys = select(api_keys.c.id).where(
        or_(*(column.icontains(text, autoescape=True) for column in (api_keys.c.name, api_keys.c.prefix)))
    )
    return or_(*(column.icontains(text, autoescape=True) for column in columns), requests.c.key_id.in_(keys))


def _to_micros(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(microseconds=1)


def _from_micros(micros: int) -> datetime:
    try:
        return _EPOCH + timedelta(microseconds=micros)
    except OverflowError:
        raise InvalidValue("cursor is not one of this list", param="cursor") from None
