"""Reads the usage events that an invoice covers, their sums, and the notes of corrections. Knows neither lines nor money rules.

Let m be the month of an event's billing day and p its posting. The closed invoice of month M with `through_posting` P covers
every billed event of the tenant with m <= M and p <= P that no earlier invoice covers. Months are closed in order and postings
only grow, so each invoice's set {m <= M, p <= P} contains that of the invoice before. An invoice bills the difference of the
two sets: every event is on at most one invoice, and events on no invoice are still open.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, Select, and_, case, extract, func, literal, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.money import discounted
from appliance.base.tables import prices, usage_events
from appliance.metering.calendar import last_day
from appliance.metering.invoicing.lines import TOKEN_KINDS, EventSums
from appliance.metering.ledger.records import BILLED, TOKEN_COLUMNS, UsageEvent
from appliance.metering.ledger.rollups import join_sum, split_sum
from appliance.metering.ledger.rows import event_from_row


@dataclass(frozen=True, slots=True)
class Coverage:
    """The events that an invoice and all earlier ones cover: months up to `month`, postings up to `through_posting`."""

    month: str
    through_posting: int


async def read_event_sums(
    connection: AsyncConnection, previous: Mapping[str, Coverage | None], coverage: Coverage
) -> dict[str, list[EventSums]]:
    """Return the sums of the events in `coverage` but not in `previous`, the coverage of a tenant's last closed invoice (None:
    none), by tenant id. The tenants are those in `previous`."""
    groups: list[RowMapping] = []
    for covered in _parts(previous, coverage):
        groups += (await connection.execute(_sums_query(covered))).mappings()
    price_ids = {group["price_id"] for group in groups} - {None}
    unit_prices = await _read_unit_prices(connection, price_ids) if price_ids else {}
    corrected = {group["tenant_id"] for group in groups if group["kind"] != "usage"}
    notes: dict[tuple[str, str, str, str], tuple[tuple[int, str], ...]] = {}
    for covered in _parts({tenant_id: last for tenant_id, last in previous.items() if tenant_id in corrected}, coverage):
        notes |= await _read_notes(connection, covered)
    sums: dict[str, list[EventSums]] = {tenant_id: [] for tenant_id in previous}
    for group in groups:
        # The groups of one key differ in price and batch, its notes do not: they go to the first of them.
        own_notes = notes.pop(_notes_key(group), ()) if group["kind"] != "usage" else ()
        sums[group["tenant_id"]].append(_event_sums(group, unit_prices.get(group["price_id"], _NO_PRICES), own_notes))
    return sums


async def read_covered_events(
    connection: AsyncConnection,
    tenant_id: str,
    coverage: Coverage,
    previous: Coverage | None,
    from_day: date | None,
    *,
    kind: str | None,
    after_posting: int,
    rows_max: int,
) -> list[UsageEvent]:
    """Return the events that `read_event_sums` sums, in posting order: from billing day `from_day` on (None: all), and of one
    `kind` (None: both)."""
    events = usage_events.c
    covered = [*_billed(coverage), events.tenant_id == tenant_id, events.billing_day <= last_day(coverage.month)]
    if previous is not None:
        covered.append(or_(events.billing_day > last_day(previous.month), events.posting > previous.through_posting))
    query = select(usage_events).where(*covered, events.posting > after_posting)
    if from_day is not None:
        query = query.where(events.billing_day >= from_day)
    if kind is not None:  # adjustments are few and have a partial index, used only if the kind is a literal in the query
        query = query.where(events.kind == literal(kind, literal_execute=True))
    rows = (await connection.execute(query.order_by(events.posting).limit(rows_max))).mappings().all()
    return [event_from_row(row) for row in rows]


def _parts(previous: Mapping[str, Coverage | None], coverage: Coverage) -> list[Sequence[ColumnElement[bool]]]:
    """Return the conditions for the events in `coverage` but not in `previous`, in two parts for all tenants whose last closed
    month is the same: events of later days, and late events, posted since `previous` on days that it includes. The cost of
    reading each depends on its size, not on the tenants' total usage.
    """
    events, end = usage_events.c, last_day(coverage.month)
    by_month: dict[str | None, dict[str, Coverage | None]] = defaultdict(dict)
    for tenant_id, covered in previous.items():
        by_month[covered.month if covered else None][tenant_id] = covered
    parts: list[Sequence[ColumnElement[bool]]] = []
    for month, of_month in by_month.items():
        billed = [*_billed(coverage), events.billing_day <= end, events.tenant_id.in_(of_month)]
        if month is None:
            parts.append(billed)
            continue
        previous_end = last_day(month)
        if month != coverage.month:
            parts.append([*billed, events.billing_day > previous_end])
        # coalesce() hides the day from the index: a planner without statistics would read all of the tenants' days.
        is_late_day = func.coalesce(events.billing_day, events.billing_day) <= previous_end
        parts.append([*_billed(coverage), is_late_day, _posted_since(of_month)])
    return parts


def _posted_since(previous: Mapping[str, Coverage | None]) -> ColumnElement[bool]:
    """Return the condition for the tenants' events with postings after those of `previous`; tenants without one have none."""
    events = usage_events.c
    tenant_ids: dict[int, list[str]] = defaultdict(list)
    for tenant_id, covered in previous.items():
        if covered is not None:
            tenant_ids[covered.through_posting].append(tenant_id)
    return or_(*(and_(events.tenant_id.in_(ids), events.posting > posting) for posting, ids in sorted(tenant_ids.items())))


def _sums_query(covered: Sequence[ColumnElement[bool]]) -> Select[Any]:
    return _SUMS.where(*covered)


async def _read_unit_prices(connection: AsyncConnection, price_ids: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Return the prices in the order of TOKEN_KINDS, before discount, by id."""
    query = select(prices.c.id, *(prices.c[name] for name in TOKEN_KINDS)).where(prices.c.id.in_(price_ids))
    return {price_id: tuple(unit_prices) for price_id, *unit_prices in (await connection.execute(query)).all()}


async def _read_notes(
    connection: AsyncConnection, covered: Sequence[ColumnElement[bool]]
) -> dict[tuple[str, str, str, str], tuple[tuple[int, str], ...]]:
    """Return the distinct notes of the covered corrections, each with its first posting, by tenant, month, model and
    currency."""
    events = usage_events.c
    groups = (events.tenant_id, *_MONTH, events.model, events.currency, events.note)
    is_correction = events.kind == literal("adjustment", literal_execute=True)
    query = select(*groups, func.min(events.posting).label("posting")).where(*covered, is_correction, events.note.is_not(None))
    notes: dict[tuple[str, str, str, str], tuple[tuple[int, str], ...]] = {}
    for row in (await connection.execute(query.group_by(*groups).order_by("posting"))).mappings():
        key = _notes_key(row)
        notes[key] = (*notes.get(key, ()), (row["posting"], row["note"]))
    return notes


def _notes_key(row: RowMapping) -> tuple[str, str, str, str]:
    return row["tenant_id"], _month(row), row["model"], row["currency"]


def _has_tokens() -> dict[str, ColumnElement[bool]]:
    """Return the condition, by kind in the order of TOKEN_KINDS, that an event has tokens of that kind. Counts of such events
    do not depend on how the events are grouped, by day or by the time of closing."""
    events = usage_events.c
    conditions = (
        events.prompt_tokens > events.cached_tokens,
        events.cached_tokens > 0,
        events.completion_tokens > 0,
        events.rejected_tokens > 0,
    )
    return dict(zip(TOKEN_KINDS, conditions, strict=True))


def _billed(coverage: Coverage) -> list[ColumnElement[bool]]:
    """Return the conditions for billed events with postings up to that of `coverage`."""
    return [usage_events.c.status.in_(BILLED), usage_events.c.posting <= coverage.through_posting]


def _event_sums(row: RowMapping, unit_prices: Sequence[int], notes: tuple[tuple[int, str], ...]) -> EventSums:
    basis_points = row["price_basis_points"]
    prompt, cached, completion, rejected = (discounted(unit, basis_points) for unit in unit_prices)
    is_correction = row["kind"] != "usage"
    return EventSums(
        month=_month(row),
        model=row["model"],
        currency=row["currency"],
        is_correction=is_correction,
        batch=row["batch"],
        unit_prices=(prompt, cached, completion, rejected),
        requests=0 if is_correction else int(row["requests"]),
        kind_requests=(
            int(row["requests_prompt"]),
            int(row["requests_cached_prompt"]),
            int(row["requests_completion"]),
            int(row["requests_rejected_draft"]),
        ),
        **{name: int(row[name]) for name in TOKEN_COLUMNS},
        cost_picos=join_sum(row["cost_high"], row["cost_low"]),
        notes=notes,
    )


def _month(row: RowMapping) -> str:
    return f"{int(row['year']):04d}-{int(row['month']):02d}"


def _grouped_sums() -> Select[Any]:
    """Return the query for the sums of all events, by tenant, month, model, price and kind."""
    events = usage_events.c
    terms = (events.currency, events.batch, events.price_id, events.price_basis_points)
    groups = (events.tenant_id, *_MONTH, events.model, events.kind, *terms)
    high, low = split_sum(events.cost_picos)
    return select(
        *groups,
        func.count().label("requests"),
        *(func.sum(case((has, 1), else_=0)).label(f"requests_{kind}") for kind, has in _has_tokens().items()),
        *(func.sum(events[name]).label(name) for name in TOKEN_COLUMNS),
        high.label("cost_high"),
        low.label("cost_low"),
    ).group_by(*groups)


_MONTH = (
    extract("year", usage_events.c.billing_day).label("year"),
    extract("month", usage_events.c.billing_day).label("month"),
)
_NO_PRICES = (0,) * len(TOKEN_KINDS)
_SUMS = _grouped_sums()
