"""Checks invariants over the whole ledger: corrections, postings, rollups, invoices. Single events are checked elsewhere."""

from __future__ import annotations

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from appliance.base import counters, tables
from appliance.base.texts import counted
from appliance.metering.calendar import BillingCalendar
from appliance.metering.invariants import invoices
from appliance.metering.invariants.finding import Finding, list_ids
from appliance.metering.ledger import rollups
from appliance.metering.ledger.records import BILLED, TOKEN_COLUMNS
from appliance.metering.ledger.rollups import split_sum

_EVENTS = tables.usage_events
_SHARED = ("tenant_id", "key_id", "model", "currency", "billing_day", "price_basis_points", "admitted_at")
_COUNTS = (*TOKEN_COLUMNS, "cost_picos")


async def check(connection: AsyncConnection, kind: str, calendar: BillingCalendar) -> list[Finding]:
    """Return one finding per invariant, all read through `connection` (one snapshot)."""
    return [
        await _check_corrections(connection),
        await _check_postings(connection),
        await _check_rollups(connection, kind, calendar),
        await invoices.check(connection),
    ]


async def _check_corrections(connection: AsyncConnection) -> Finding:
    original = aliased(_EVENTS)
    joined = _EVENTS.outerjoin(original, original.c.id == _EVENTS.c.corrects_id)
    invalid = (
        select(_EVENTS.c.id)
        .select_from(joined)
        .where(
            _EVENTS.c.kind == "adjustment",
            or_(
                original.c.id.is_(None),
                original.c.kind != "usage",
                original.c.status.not_in(BILLED),
                original.c.request_id != _EVENTS.c.request_id,
                *(original.c[name].is_distinct_from(_EVENTS.c[name]) for name in _SHARED),
                _EVENTS.c.batch & ~original.c.batch,  # not the reverse: older versions do not set `batch`
                _EVENTS.c.price_id.is_not(None) & original.c.price_id.is_distinct_from(_EVENTS.c.price_id),
            ),
        )
        .order_by(_EVENTS.c.id)
    )
    ids = [str(row.id) for row in (await connection.execute(invalid)).all()]
    if ids:
        return Finding("corrections", "broken", list_ids(ids, "adjustments that do not correct a settled event"))
    negative = [str(event_id) for event_id in await _negative_events(connection)]
    if negative:
        return Finding("corrections", "broken", list_ids(negative, "events that add up to less than zero"))
    adjustments = select(func.count()).select_from(_EVENTS).where(_EVENTS.c.kind == "adjustment")
    count = (await connection.execute(adjustments)).scalar_one()
    return Finding("corrections", "holds", f"{counted(count, 'adjustment')}, each of a settled event")


async def _negative_events(connection: AsyncConnection) -> list[int]:
    """Return the events of which a count or the cost is negative together with their corrections."""
    corrected = select(_EVENTS.c.corrects_id).where(_EVENTS.c.corrects_id.is_not(None))
    original_id = func.coalesce(_EVENTS.c.corrects_id, _EVENTS.c.id)
    halves = {name: split_sum(_EVENTS.c[name]) for name in _COUNTS}
    sums = {name: high * rollups.SPLIT + low for name, (high, low) in halves.items()}
    query = (
        select(original_id)
        .where(or_(_EVENTS.c.corrects_id.is_not(None), _EVENTS.c.id.in_(corrected)))
        .group_by(original_id)
        .having(or_(*(total < 0 for total in sums.values()), sums["cached_tokens"] > sums["prompt_tokens"]))
        .order_by(original_id)
    )
    return list((await connection.execute(query)).scalars().all())


async def _check_postings(connection: AsyncConnection) -> Finding:
    settled = _EVENTS.c.status != "pending"
    numbers = select(
        func.count(), func.count(_EVENTS.c.posting), func.min(_EVENTS.c.posting), func.max(_EVENTS.c.posting)
    ).where(settled)
    events, posted, first, last = (await connection.execute(numbers)).one()
    early = (
        await connection.execute(select(func.count()).where(_EVENTS.c.status == "pending", _EVENTS.c.posting.is_not(None)))
    ).scalar_one()
    counter = await counters.last_taken(connection, counters.POSTING)
    if early or posted != events:
        return Finding("postings", "broken", f"{events - posted} settled events have no posting, {early} pending ones have one")
    if events and (first, last) != (1, events):
        return Finding("postings", "broken", f"{events} events have the postings {first} to {last}")
    if counter != events:
        return Finding("postings", "broken", f"{events} events have postings, but the counter is at {counter}")
    return Finding("postings", "holds", f"{counted(events, 'event')}, numbered without a gap")


async def _check_rollups(connection: AsyncConnection, kind: str, calendar: BillingCalendar) -> Finding:
    wrong = await rollups.mismatched_levels(connection, kind, calendar)
    if wrong:
        text = f"the sums by {', '.join(wrong)} differ from the events: run gatehouse db rebuild-rollups"
        return Finding("rollups", "broken", text)
    return Finding("rollups", "holds", "the sums by minute, hour and day equal those of the events")
