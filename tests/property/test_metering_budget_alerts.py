"""Every threshold that is crossed is told at least once and at most once, whatever the order of settlements, corrections,
budget changes, failing commits and restarts."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from datetime import timedelta
from fractions import Fraction

import pytest
from sqlalchemy.exc import OperationalError

from appliance.base.counters import POSTING, take
from appliance.base.db import Database
from appliance.metering.alerts.budgets import BudgetAlerts
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger import rollups
from appliance.metering.ledger.records import UsageEvent
from appliance.tenancy.access import WHOLE_BOX
from appliance.tenancy.principals import TenantChanges
from appliance.tenancy.tenants import Tenants
from tests.support.alerts import TARGET, AlertBox, alert_box, settled_event
from tests.support.cast import Cast, Person
from tests.support.clock import START, FakeClock
from tests.support.ledgers import FailingDatabase

STEPS = 60
SEEDS = 6
PERCENTS = (50, 80, 100)
BUDGETS = (40, 100, 101, 333)
CALENDAR = BillingCalendar("Europe/Berlin")


class Month:
    """The plain twin of one tenant's months: every spending ever, and what must have been told by now."""

    def __init__(self) -> None:
        self.budget = 0
        self.spent: dict[str, int] = defaultdict(int)
        self.due: set[tuple[str, int, int]] = set()

    def settle(self, events: list[UsageEvent]) -> None:
        """Count events that were settled together, and the thresholds that stand reached with them."""
        for event in events:
            self.spent[CALENDAR.month_of(event.billing_day)] += event.cost_picos
        for month in {CALENDAR.month_of(event.billing_day) for event in events}:
            self.check(month)

    def check(self, month: str) -> None:
        """Note which thresholds of the budget are reached."""
        if self.budget:
            share = Fraction(self.spent[month], self.budget * 10**12)
            self.due |= {(month, percent, self.budget) for percent in PERCENTS if share >= Fraction(percent, 100)}


class Life:
    """One history that chance decides, with its twin beside it."""

    def __init__(self, database: Database, clock: FakeClock, cast: Cast, seed: int) -> None:
        self.chance = random.Random(seed)
        self.clock = clock
        self.people = {person.tenant.id: person for person in (cast.bob, cast.charlie)}
        self.twins = {tenant_id: Month() for tenant_id in self.people}
        self.database = FailingDatabase.around(database)
        self.alerts = alert_box(self.database, clock)
        self.budgets = BudgetAlerts(self.database, clock, CALENDAR)

    async def step(self) -> None:
        """Do one thing."""
        await self.chance.choices(
            [
                self.settle,
                self.settle_at_once,
                self.change_budget,
                self.change_something_else,
                self.restart,
                self.budgets.sweep,
            ],
            [12, 4, 2, 3, 1, 2],
        )[0]()

    def events(self, units: tuple[int, ...] = (0, 1, 3, 10, 40, -5, -20)) -> list[UsageEvent]:
        """Return events of the last weeks, some of them corrections that give money back."""
        chance = self.chance
        made = []
        for _ in range(chance.randrange(1, 6)):
            person: Person = chance.choice(list(self.people.values()))
            at = self.clock.now() + timedelta(days=chance.randrange(-30, 15))
            made.append(settled_event(person, chance.choice(units) * 10**12, at))
        return made

    async def settle(self) -> None:
        """Settle some events in one transaction, which fails now and then and is tried again."""
        events = self.events()
        fails = self.chance.random() < 0.25
        self.database.fail_before_commit = int(fails)
        if fails:
            with pytest.raises(OperationalError):
                await self.write(events)
        await self.write(events)
        self.count(events)

    async def settle_at_once(self) -> None:
        """Settle in transactions that run at once: only the counter of postings puts them in an order."""
        groups = [self.events(units=(0, 1, 3, 10, 40)) for _ in range(3)]
        await asyncio.gather(*(self.write(events) for events in groups))
        self.count([event for events in groups for event in events])  # nothing is given back: the order changes nothing

    def count(self, events: list[UsageEvent]) -> None:
        """Let the twins count what was settled."""
        for tenant_id, twin in self.twins.items():
            twin.settle([event for event in events if event.tenant_id == tenant_id])

    async def write(self, events: list[UsageEvent]) -> None:
        """Do what the ledger does with settled events."""
        async with self.database.writing() as connection:
            await take(connection, POSTING, len(events))
            await rollups.add(connection, CALENDAR, events)
            await connection.run_sync(self.budgets.settled, events)

    async def change_budget(self) -> None:
        """Raise or lower a budget; a sweep sees what stands reached by that."""
        tenant_id, twin = self.chance.choice(list(self.twins.items()))
        twin.budget = self.chance.choice(BUDGETS)
        changes = TenantChanges(limits={"monthly_budget": twin.budget * 10**6}, alert_percents=list(PERCENTS))
        await Tenants(self.database, self.clock).update(tenant_id, changes, access=WHOLE_BOX)
        await self.budgets.sweep()
        twin.check(CALENDAR.month_of(self.clock.now()))

    async def change_something_else(self) -> None:
        """Change a tenant in what concerns no budget."""
        weight = TenantChanges(weight=self.chance.randrange(1, 10))
        await Tenants(self.database, self.clock).update(self.chance.choice(list(self.people)), weight, access=WHOLE_BOX)

    async def restart(self) -> None:
        """Forget everything that is not in the database."""
        self.budgets = BudgetAlerts(self.database, self.clock, CALENDAR)

    async def told(self, tenant_id: str, webhook_id: str) -> list[tuple[str, int, int]]:
        """Return what a webhook was told of a tenant."""
        data = [message.payload["data"] for message in await self.alerts.messages() if message.webhook_id == webhook_id]
        return [
            (told["month"], told["percent"], told["monthly_budget"] // 10**6) for told in data if told["tenant_id"] == tenant_id
        ]


async def listeners(alerts: AlertBox, cast: Cast) -> dict[str, set[str]]:
    """Return webhooks of the box, of Bob and of Charlie, and whom each hears of."""
    everybody = {cast.bob.tenant.id, cast.charlie.tenant.id}
    heard = {None: everybody, cast.bob.tenant.id: {cast.bob.tenant.id}, cast.charlie.tenant.id: {cast.charlie.tenant.id}}
    made = {}
    for owner, tenants in heard.items():
        webhook, _ = await alerts.webhooks.create(kind="webhook", target=TARGET, tenant_id=owner, access=WHOLE_BOX)
        made[webhook.id] = tenants
    return made


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_every_crossing_is_told_to_each_who_listens_once(
    database: Database, clock: FakeClock, cast: Cast, seed: int
) -> None:
    life = Life(database, clock, cast, seed)
    heard_by = await listeners(life.alerts, cast)
    for _ in range(STEPS):
        await life.step()
    for webhook_id, tenants in heard_by.items():
        for tenant_id, twin in life.twins.items():
            told = await life.told(tenant_id, webhook_id)
            assert len(told) == len(set(told)), "told twice"
            assert set(told) == (twin.due if tenant_id in tenants else set())
    assert any(twin.due for twin in life.twins.values()), f"nothing happened from {START} on"
