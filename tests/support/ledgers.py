"""Ledgers for tests: components in UTC and EUR, running ledgers, databases that fail on demand, and reading events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import Connection, select
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.tables import usage_events
from appliance.metering.alerts.budgets import BudgetAlerts
from appliance.metering.calendar import BillingCalendar
from appliance.metering.invoicing.invoices import Invoices
from appliance.metering.ledger.corrections import Corrections
from appliance.metering.ledger.records import Settlement, UsageEvent
from appliance.metering.ledger.recovery import recover
from appliance.metering.ledger.rows import event_from_row
from appliance.metering.ledger.writer import Ledger
from appliance.metering.limits.admission import Admission
from appliance.metering.limits.ledger_sums import LedgerSums
from appliance.metering.limits.owners import Owner
from appliance.metering.limits.sums import SumsReader
from appliance.metering.prices import PriceBook

UTC = BillingCalendar("UTC")
EUR = "EUR"
_TERMS: dict[str, Any] = {"currency": EUR, "calendar": UTC}


def without_alerts(_connection: Connection, _events: Sequence[UsageEvent]) -> None:
    """A listener to settled events that raises no alert."""


def utc_ledger(database: Database, clock: Clock, epoch_id: str, **options: Any) -> Ledger:
    """Return a ledger in UTC and EUR, unless `options` say otherwise."""
    return Ledger(database, clock, epoch_id, **_TERMS | {"on_settled": without_alerts} | options)


def utc_sums(database: Database, *, calendar: BillingCalendar = UTC) -> LedgerSums:
    """Return sums by day of an appliance whose requests take an hour at most."""
    return LedgerSums(database, calendar=calendar, request_deadline_s=3600.0)


def utc_admission(clock: Clock, sums: SumsReader, **options: Any) -> Admission:
    """Return an admission in UTC and EUR, unless `options` say otherwise."""
    return Admission(clock, sums, **_TERMS | options)


def utc_corrections(database: Database, clock: Clock, **options: Any) -> Corrections:
    """Return corrections in UTC, unless `options` say otherwise."""
    listeners = {"on_settled": without_alerts, "on_committed": lambda _event: None}
    return Corrections(database, clock, **{"calendar": UTC} | listeners | options)


async def utc_recover(database: Database, clock: Clock, current_epoch: str) -> int:
    """Recover the pending requests of dead epochs, in UTC, and return their number."""
    return await recover(database, clock, current_epoch, calendar=UTC, on_settled=without_alerts)


def num_running(admission: Admission, owner_id: str) -> int:
    """Return the number of requests of a tenant or key that hold a reservation."""
    return sum(admission.in_use(Owner(scope, owner_id)).get("concurrency", 0) for scope in ("tenant", "key"))


def num_waiting(admission: Admission) -> int:
    """Return the number of requests that wait for room in their limits."""
    return len(admission._queue.waiting)


def euro_prices(database: Database, clock: Clock) -> PriceBook:
    """Return the prices of an appliance that bills in EUR."""
    return PriceBook(database, clock, currency=EUR)


def euro_invoices(database: Database, clock: Clock, calendar: BillingCalendar) -> Invoices:
    """Return the invoices of an appliance that bills in EUR."""
    return Invoices(database, clock, calendar, currency=EUR)


def euro_budget_alerts(database: Database, clock: Clock, calendar: BillingCalendar) -> BudgetAlerts:
    """Return the budget alerts of an appliance that bills in EUR."""
    return BudgetAlerts(database, clock, calendar, currency=EUR)


@asynccontextmanager
async def running_ledger(
    database: Database, clock: Clock, epoch_id: str, *, checkpoint_interval_s: float = 0.0, settle_pause_s: float = 0.0
) -> AsyncIterator[Ledger]:
    """Yield a running ledger that by default writes checkpoints in every round and settlements at once."""
    ledger = utc_ledger(database, clock, epoch_id, checkpoint_interval_s=checkpoint_interval_s, settle_pause_s=settle_pause_s)
    await ledger.start()
    try:
        yield ledger
    finally:
        await ledger.stop()


async def kill_ledger(ledger: Ledger) -> None:
    """End the ledger abruptly, as when the process is killed."""
    assert ledger._task is not None
    ledger._task.cancel()
    await asyncio.wait({ledger._task})


async def all_events(database: Database) -> list[UsageEvent]:
    """Return every usage event in order."""
    async with database.reading() as connection:
        rows = (await connection.execute(select(usage_events).order_by(usage_events.c.id))).mappings().all()
    return [event_from_row(row) for row in rows]


async def settle(ledger: Ledger, settlement: Settlement) -> UsageEvent:
    """Settle, and return the event as stored."""
    await ledger.settle(settlement)
    of_request = (usage_events.c.request_id == settlement.request_id, usage_events.c.kind == "usage")
    async with ledger._db.reading() as connection:
        row = (await connection.execute(select(usage_events).where(*of_request))).mappings().one()
    return event_from_row(row)


class FailingDatabase(Database):
    """A database whose next transactions fail, before or after their COMMIT."""

    fail_before_commit = 0
    fail_after_commit = 0
    commits = 0
    gate: asyncio.Event | None = None
    held = 0

    @classmethod
    def around(cls, database: Database) -> FailingDatabase:
        """Wrap `database` with fault injection."""
        made = cls.__new__(cls)
        made.__dict__.update(database.__dict__)
        return made

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """Yield a transaction that ends as the test has set."""
        await self._passed()
        async with super().writing() as connection:
            yield connection
            self._before_commit()
        self._after_commit()

    async def batch_write(self, fn: Any, *args: Any, **options: Any) -> Any:
        """Write in a transaction that ends as the test has set."""

        def work(connection: Connection) -> Any:
            result = fn(connection, *args, **options)
            self._before_commit()
            return result

        await self._passed()
        result = await super().batch_write(work)
        self._after_commit()
        return result

    async def _passed(self) -> None:
        if self.gate is not None:
            self.held += 1
            await self.gate.wait()
            self.held -= 1

    def _before_commit(self) -> None:
        if self.fail_before_commit:
            self.fail_before_commit -= 1
            raise OperationalError("COMMIT", {}, OSError("disk full"))

    def _after_commit(self) -> None:
        self.commits += 1
        if self.fail_after_commit:
            self.fail_after_commit -= 1
            raise OperationalError("COMMIT", {}, OSError("connection lost"))
