"""Crash recovery: pending events of dead epochs become `recovered`, exactly once, before anything is served."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import RowMapping, Select, bindparam, literal_column, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base import counters
from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.tables import requests, usage_events
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger import rollups
from appliance.metering.ledger.epochs import lock_epoch
from appliance.metering.ledger.records import TOKEN_COLUMNS, Usage, UsageEvent
from appliance.metering.ledger.round import OnSettled
from appliance.metering.ledger.rows import (
    EVENTS_WITH_PRICES,
    SETTLE_EVENTS,
    cost_of,
    event_from_row,
    rate_of,
    settle_event_parameters,
)
from appliance.tenancy.audit import record

EVENTS_PER_TRANSACTION = 500
CAUSE = "gateway_died"
RECOVERED_ERROR = "the appliance stopped while this request ran"

_FINISH_REQUESTS = (
    update(requests)
    .where(requests.c.id == bindparam("of_request"), requests.c.finished_at.is_(None))
    .values(
        cached_tokens=bindparam("new_cached_tokens"),
        completion_tokens=bindparam("new_completion_tokens"),
        finish_reason="error",
        error=RECOVERED_ERROR,
        finished_at=bindparam("new_settled_at", type_=requests.c.finished_at.type),
    )
)


async def recover(
    db: Database,
    clock: Clock,
    current_epoch: str,
    *,
    calendar: BillingCalendar,
    on_settled: OnSettled,
) -> int:
    """Settle every pending event of other epochs at its last checkpoint, marked as an estimate; return their number.

    `on_settled` receives them in the same transaction, as it does from the ledger. Call this before the ledger of
    `current_epoch` starts: there is one writer at a time. Each event changes once, even if this is interrupted or run twice.
    Raises EpochEnded if a later epoch has begun meanwhile: its pending events are live.
    """
    total = 0
    while True:
        async with db.writing() as connection:
            events = await _recover_batch(connection, current_epoch, calendar, clock.now())
            if events:
                after = {"events": len(events)}
                await connection.run_sync(on_settled, events)
                await record(connection, clock, "ledger.recover", "epoch", current_epoch, after=after)
        total += len(events)
        if len(events) < EVENTS_PER_TRANSACTION:
            return total


async def _recover_batch(
    connection: AsyncConnection, current_epoch: str, calendar: BillingCalendar, now: datetime
) -> list[UsageEvent]:
    await connection.run_sync(lock_epoch, current_epoch)
    await counters.lock(connection, counters.POSTING)  # a concurrent recovery waits here, and then finds nothing
    if connection.dialect.name == "postgresql":
        # A killed gateway's COMMIT may still be running on the server, and its event would appear after our query: wait for it.
        await connection.execute(text("LOCK TABLE usage_events IN SHARE ROW EXCLUSIVE MODE"))
    request_ids = (await connection.execute(_pending_of_dead_epochs(current_epoch))).scalars().all()
    if not request_ids:
        return []
    rows = (await connection.execute(EVENTS_WITH_PRICES, {"request_ids": request_ids})).mappings().all()
    first = await counters.take(connection, counters.POSTING, len(rows))
    ordered = sorted(rows, key=lambda row: str(row["request_id"]))
    events = [_recovered(row, posting, now) for posting, row in enumerate(ordered, first)]
    parameters = [settle_event_parameters(event) for event in events]
    await connection.run_sync(SETTLE_EVENTS.execute, parameters)
    await connection.execute(_FINISH_REQUESTS, _request_parameters(parameters))
    await connection.run_sync(rollups.add, calendar, events)
    return events


def _pending_of_dead_epochs(current_epoch: str) -> Select[Any]:
    """Return the query for a batch of pending events of other epochs, in the order of the index on pending events."""
    events = usage_events.c
    query = select(events.request_id).where(events.status == literal_column("'pending'"), events.epoch_id != current_epoch)
    return query.order_by(events.epoch_id, events.id).limit(EVENTS_PER_TRANSACTION)


def _recovered(row: RowMapping, posting: int, now: datetime) -> UsageEvent:
    event = event_from_row(row)
    usage = Usage(**{name: row[name] for name in TOKEN_COLUMNS})
    return msgspec.structs.replace(
        event,
        status="recovered",
        finish_reason="error",
        cause=CAUSE,
        estimated=True,
        cost_picos=cost_of(rate_of(row), usage),
        posting=posting,
        settled_at=now,
    )


def _request_parameters(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    names = ("of_request", "new_cached_tokens", "new_completion_tokens", "new_settled_at")
    return [{name: event[name] for name in names} for event in events]
