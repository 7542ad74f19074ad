"""Spending for tests of budget alerts: a ledger with budget alerts, and a price of one unit of money per output token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.metering.alerts.budgets import BudgetAlerts
from appliance.metering.alerts.outbox import Delivery
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.writer import Ledger
from appliance.metering.prices import Price
from appliance.tenancy.tenants import Tenants
from tests.support.alerts import AlertParts
from tests.support.cast import Person, change_tenant
from tests.support.factories import pending, posted, voided
from tests.support.ledgers import euro_budget_alerts, euro_prices, utc_ledger

UNIT = 10**6  # micro-units in one unit of money
PICOS = 10**12


class Spender:
    """A ledger with budget alerts. Each completion token costs one unit of money."""

    def __init__(self, alerts: AlertParts, budgets: BudgetAlerts, ledger: Ledger, price: Price) -> None:
        self.alerts = alerts
        self.budgets = budgets
        self.price = price
        self._ledger = ledger

    async def spend(self, person: Person, units: int, *, at: datetime | None = None, model: str = "demo") -> None:
        """Admit and settle a request that costs `units`."""
        await self.settle(await self.admit(person, at=at, model=model), units)

    async def admit(self, person: Person, *, at: datetime | None = None, model: str = "demo") -> str:
        """Admit a request and return its id."""
        entry = pending(person, price=self.price, admitted_at=at or self.alerts.clock.now(), model=model)
        await self._ledger.open(entry)
        return entry.request_id

    async def settle(self, request_id: str, units: int) -> None:
        """Settle a request that costs `units`."""
        await self._ledger.settle(posted(request_id, prompt=0, completion=units))

    async def refuse(self, person: Person) -> None:
        """Admit and void a request."""
        await self._ledger.settle(voided(await self.admit(person)))

    async def alerts_sent(self) -> list[tuple[str, int]]:
        """Return period and percentage of every alert, in order."""
        return [alert_period_and_percent(message) for message in await self.alerts.messages()]


@asynccontextmanager
async def running_spender(
    alerts: AlertParts,
    epoch_id: str,
    *,
    database: Database | None = None,
    calendar: BillingCalendar | None = None,
    currency: str = "EUR",
) -> AsyncIterator[Spender]:
    """Yield a spender with a running ledger, through another `database` object if given."""
    database, clock, calendar = database or alerts.db, alerts.clock, calendar or BillingCalendar()
    budgets = euro_budget_alerts(database, clock, calendar)
    ledger = utc_ledger(database, clock, epoch_id, calendar=calendar, on_settled=budgets.on_settled)
    await ledger.start()
    try:
        yield Spender(alerts, budgets, ledger, await make_price(alerts.db, clock, currency))
    finally:
        await ledger.stop()


async def make_price(database: Database, clock: Clock, currency: str) -> Price:
    """Return a price at which each completion token costs one unit of money."""
    prices = euro_prices(database, clock)
    return await prices.add(model="demo", currency=currency, prompt=0, cached_prompt=0, completion=PICOS)


def alert_period_and_percent(message: Delivery) -> tuple[str, int]:
    """Return period and percentage of an alert."""
    data = message.payload["data"]
    return data.get("month") or data["day"], data["percent"]


async def set_budget(database: Database, clock: Clock, person: Person, units: int | None, **changes: Any) -> None:
    """Set a tenant's monthly budget."""
    limits = {"monthly_budget": None if units is None else units * UNIT}
    await change_tenant(Tenants(database, clock), person, limits=limits, **changes)
