"""Reads the usage events that an invoice covers, their sums, and the notes of corrections. Knows neither lines nor money rules.

Let m be the month of an event's billing day and p its posting. The closed invoice of month M with `through_posting` P covers
every billed event of the tenant with m <= M and p <= P that no earlier invoice covers. Months are closed in order and postings
only grow, so each invoice's set {m <= M, p <= P} contains that of the invoice before. An invoice bills the difference of the
two sets: every event is on at most one invoice, and events on no invoice are still open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, Select, case, func, literal, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.money import discounted
from appliance.base.tables import prices, usage_events
from appliance.metering.calendar import last_day
from appliance.metering.invoicing.lines import TOKEN_KINDS, EventSums
from appliance.metering.ledger.records import BILLED, TOKEN_COLUMNS, UsageEvent
from appliance.metering.ledger.rollups import join_sum, split_sum
from appliance.metering.ledger.rows import event_from_row

_PRICES = ("prompt", "cached_prompt", "completion", "rejected_draft")


@dataclass(frozen=True, slots=True)
class Coverage:
    """The events that an invoice and all earlier ones cover: months up to `month`, postings up to `through_posting`."""

    month: str
    through_posting: int


async def read_event_sums(
    connection: AsyncConnection, tenant_id: str, coverage: Coverage, previous: Coverage | None
) -> list[EventSums]:
    """Return the sums of the events in `coverage` but not in `previous`, the coverage of the last closed invoice."""
    sums: list[EventSums] = []
    for covered in _parts(tenant_id, coverage, previous):
        groups = (await connection.execute(_sums_query(covered))).mappings().all()
        has_corrections = any(group["kind"] != "usage" for group in groups)
        notes = await _read_notes(connection, covered) if has_corrections else {}
        # The groups of one key differ in price and batch, its notes do not: they go to the first of them.
        sums += [_event_sums(group, notes.pop(_notes_key(group), ()) if group["kind"] != "usage" else ()) for group in groups]
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
    covered = [*_billed_of_tenant(tenant_id, coverage), events.billing_day <= last_day(coverage.month)]
    if previous is not None:
        covered.append(or_(events.billing_day > last_day(previous.month), events.posting > previous.through_posting))
    query = select(usage_events).where(*covered, events.posting > after_posting)
    if from_day is not None:
        query = query.where(events.billing_day >= from_day)
    if kind is not None:  # adjustments are few and have a partial index, used only if the kind is a literal in the query
        query = query.where(events.kind == literal(kind, literal_execute=True))
    rows = (await connection.execute(query.order_by(events.posting).limit(rows_max))).mappings().all()
    return [event_from_row(row) for row in rows]


def _parts(tenant_id: str, coverage: Coverage, previous: Coverage | None) -> list[Sequence[ColumnElement[bool]]]:
    """Return the conditions for the events in `coverage` but not in `previous`, in two parts: events of later days, and late
    events, posted since `previous` on days that it includes. The cost of reading each depends on its size, not on the tenant's
    total usage.
    """
    events, end = usage_events.c, last_day(coverage.month)
    billed = _billed_of_tenant(tenant_id, coverage)
    if previous is None:
        return [[*billed, events.billing_day <= end]]
    previous_end = last_day(previous.month)
    # coalesce() hides the day from the index: a planner without statistics would read all of the tenant's days.
    is_late_day = func.coalesce(events.billing_day, events.billing_day) <= previous_end
    late = [*billed, is_late_day, events.posting > previous.through_posting]
    if previous.month == coverage.month:
        return [late]
    return [[*billed, events.billing_day > previous_end, events.billing_day <= end], late]


def _sums_query(covered: Sequence[ColumnElement[bool]]) -> Select[Any]:
    events = usage_events.c
    terms = (events.currency, events.batch, events.price_id, events.price_basis_points)
    groups = (events.billing_day, events.model, events.kind, *terms)
    high, low = split_sum(events.cost_picos)
    grouped = (
        select(
            *groups,
            func.count().label("requests"),
            *(func.sum(case((has, 1), else_=0)).label(f"requests_{kind}") for kind, has in _has_tokens().items()),
            *(func.sum(events[name]).label(name) for name in TOKEN_COLUMNS),
            high.label("cost_high"),
            low.label("cost_low"),
        )
        .where(*covered)
        .group_by(*groups)
        .subquery()
    )
    priced = (prices.c[name].label(f"price_{name}") for name in _PRICES)
    return select(grouped, *priced).join_from(grouped, prices, prices.c.id == grouped.c.price_id, isouter=True)


async def _read_notes(
    connection: AsyncConnection, covered: Sequence[ColumnElement[bool]]
) -> dict[tuple[date, str, str], tuple[tuple[int, str], ...]]:
    """Return the distinct notes of the covered corrections, each with its first posting, by day, model and currency."""
    events = usage_events.c
    groups = (events.billing_day, events.model, events.currency, events.note)
    is_correction = events.kind == literal("adjustment", literal_execute=True)
    query = select(*groups, func.min(events.posting).label("posting")).where(*covered, is_correction, events.note.is_not(None))
    notes: dict[tuple[date, str, str], tuple[tuple[int, str], ...]] = {}
    for row in (await connection.execute(query.group_by(*groups))).mappings():
        key = _notes_key(row)
        notes[key] = (*notes.get(key, ()), (row["posting"], row["note"]))
    return notes


def _notes_key(row: RowMapping) -> tuple[date, str, str]:
    return row["billing_day"], row["model"], row["currency"]


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


def _billed_of_tenant(tenant_id: str, coverage: Coverage) -> list[ColumnElement[bool]]:
    """Return the conditions for the tenant's billed events with postings up to that of `coverage`."""
    events = usage_events.c
    return [events.tenant_id == tenant_id, events.status.in_(BILLED), events.posting <= coverage.through_posting]


def _event_sums(row: RowMapping, notes: tuple[tuple[int, str], ...]) -> EventSums:
    basis_points = row["price_basis_points"]
    prompt, cached, completion, rejected = (discounted(row[f"price_{name}"] or 0, basis_points) for name in _PRICES)
    is_correction = row["kind"] != "usage"
    return EventSums(
        month=_month(row["billing_day"]),
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


def _month(day: date) -> str:
    return f"{day.year:04d}-{day.month:02d}"
