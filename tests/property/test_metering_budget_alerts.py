"""Every threshold that is reached alerts each webhook of its owner and the appliance once, in any order of settlements,
corrections, changed limits, failing commits and restarts. The plain twin is a list of events."""

from __future__ import annotations

import asyncio
import random
from datetime import date, timedelta
from fractions import Fraction

import msgspec
import pytest
from sqlalchemy.exc import OperationalError

from appliance.base.counters import POSTING, take
from appliance.base.db import Database
from appliance.metering.alerts.budgets import ALERT_WINDOW
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger import rollups
from appliance.metering.ledger.records import UsageEvent
from appliance.tenancy.keys import Keys
from appliance.tenancy.model_policies import ModelPolicies
from appliance.tenancy.principals import KeyChanges, Limits, TenantChanges
from appliance.tenancy.tenants import Tenants
from tests.support.alerts import TARGET, AlertParts, alert_parts
from tests.support.cast import OWNER, PEPPER, Cast, Person
from tests.support.clock import START, FakeClock
from tests.support.factories import adjustment
from tests.support.ledgers import FailingDatabase, euro_budget_alerts

STEPS = 40
EACH_SEED_ON_ONE_DATABASE = [
    *(("sqlite", seed) for seed in (0, 2)),
    *(pytest.param("postgresql", seed, marks=pytest.mark.postgres) for seed in (1, 3)),
]
PERCENTS = (50, 80, 100)
LIMITS = (0, 40, 100, 101, 333)
MODELS = ("demo", "other")
CALENDAR = BillingCalendar("Europe/Berlin")
Due = tuple[str, int, int]  # the day or the month, the percentage, the limit


class Owner:
    """The plain twin of one owner: which events are its, what its limits are, and what must have been told by now."""

    def __init__(self, *, tenant: str = "", key: str = "", model: str = "") -> None:
        self.tenant, self.key, self.model = tenant, key, model
        self.currency = "EUR"
        self.percents = PERCENTS if tenant else (80, 100)
        self.limits = {"monthly_budget": 0, "tokens_per_day": 0}
        self.due: set[Due] = set()

    @property
    def name(self) -> tuple[str, str, str]:
        """Return what the alerts call it: a key's tenant is no part of it."""
        return ("" if self.key else self.tenant, self.key, self.model)

    def has(self, event: UsageEvent) -> bool:
        """Return whether an event counts against it."""
        ids = ((self.tenant, event.tenant_id), (self.key, event.key_id), (self.model, event.model))
        return all(mine in ("", its) for mine, its in ids)

    def check(self, events: list[UsageEvent], day: date, new: list[UsageEvent] | None = None, since: date = date.min) -> None:
        """Note which thresholds of the day and of its month stand reached by these events; once there are `new` ones, in what
        begins on `since` or later and counts more by them."""
        mine = [event for event in events if self.has(event)]
        month = CALENDAR.month_of(day)
        paid = [event for event in mine if CALENDAR.month_of(event.billing_day) == month and event.currency == self.currency]
        picos = sum(event.cost_picos for event in paid)
        tokens = sum(event.completion_tokens for event in mine if event.billing_day == day)
        used = {"monthly_budget": (month, Fraction(picos, 10**12)), "tokens_per_day": (day.isoformat(), Fraction(tokens))}
        first = {"monthly_budget": day.replace(day=1), "tokens_per_day": day}
        for kind, limit in self.limits.items():
            period, amount = used[kind]
            is_told = new is None or (first[kind] >= since and any(self.adds(event, kind, day) for event in new))
            if limit and is_told:
                self.due |= {(period, percent, limit) for percent in self.percents if amount / limit >= Fraction(percent, 100)}

    def adds(self, event: UsageEvent, kind: str, day: date) -> bool:
        """Return whether an event makes more of what is counted of the day, or of its month."""
        if not self.has(event):
            return False
        if kind == "tokens_per_day":
            return event.billing_day == day and event.completion_tokens > 0
        same_month = CALENDAR.month_of(event.billing_day) == CALENDAR.month_of(day)
        return same_month and event.currency == self.currency and event.cost_picos > 0


class Life:
    """One history that chance decides, with its twins beside it."""

    def __init__(self, database: Database, clock: FakeClock, people: list[Person], seed: int) -> None:
        self.chance = random.Random(seed)
        self.clock = clock
        self.people = people
        self.settled_events: list[UsageEvent] = []
        tenants = sorted({person.tenant.id for person in people})
        models = ("", *MODELS)
        self.owners = [
            *(Owner(tenant=tenant, model=model) for tenant in tenants for model in models),
            *(Owner(tenant=person.tenant.id, key=person.key.id, model=model) for person in people for model in models),
            *(Owner(model=model) for model in MODELS),
        ]
        self.database = FailingDatabase.around(database)
        self.alerts = alert_parts(self.database, clock)
        self.budgets = euro_budget_alerts(self.database, clock, CALENDAR)

    async def step(self) -> None:
        """Do one thing."""
        await self.chance.choices(
            [
                self.settle,
                self.settle_at_once,
                self.change_limit,
                self.change_something_else,
                self.restart,
                self.budgets.sweep,
            ],
            [12, 4, 4, 3, 1, 2],
        )[0]()

    def events(self, units: tuple[int, ...] = (0, 1, 3, 10, 40, -5, -20)) -> list[UsageEvent]:
        """Return events of the last months, some of them corrections that give back, some in another currency."""
        chance = self.chance
        made = []
        for _ in range(chance.randrange(1, 6)):
            at = self.clock.now() + timedelta(days=chance.choice((0, 0, chance.randrange(-100, 15))))
            cost, tokens = chance.choice(units) * 10**12, chance.choice(units)
            event = adjustment(chance.choice(self.people), at=at, cost_picos=cost, completion_tokens=tokens)
            currency = chance.choice(("EUR", "EUR", "EUR", "CHF"))
            made.append(msgspec.structs.replace(event, model=chance.choice(MODELS), currency=currency))
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
        """Let the twins look at what the events belong to."""
        self.settled_events += events
        since = CALENDAR.day_of(self.clock.now()) - ALERT_WINDOW
        for owner in self.owners:
            for day in {event.billing_day for event in events if owner.has(event)}:
                owner.check(self.settled_events, day, events, since)

    async def write(self, events: list[UsageEvent]) -> None:
        """Do what the ledger does with settled events."""
        async with self.database.writing() as connection:
            await take(connection, POSTING, len(events))
            await connection.run_sync(rollups.add, CALENDAR, events)
            await connection.run_sync(self.budgets.on_settled, events)

    async def change_limit(self) -> None:
        """Raise, lower or remove the limits of somebody; a sweep sees what stands reached by that."""
        await self.limit(self.chance.choice(self.owners))
        await self.budgets.sweep()

    async def limit(self, owner: Owner) -> None:
        """Give an owner limits, and its twin too."""
        owner.limits = {kind: self.chance.choice(LIMITS) for kind in owner.limits}
        await self.write_limits(owner)
        owner.check(self.settled_events, CALENDAR.day_of(self.clock.now()))

    async def write_limits(self, owner: Owner) -> None:
        """Write what an administrator would."""
        tenants, keys = Tenants(self.database, self.clock), Keys(self.database, self.clock, PEPPER)
        limits = {
            "monthly_budget": owner.limits["monthly_budget"] * 10**6,
            "tokens_per_day": owner.limits["tokens_per_day"] or None,
        }
        if not owner.tenant:
            await ModelPolicies(self.database, self.clock).put(owner.model, Limits(**limits))
        elif owner.key and owner.model:
            others = (await keys.get(owner.key, access=OWNER)).model_limits
            await keys.update(owner.key, KeyChanges(model_limits={**others, owner.model: limits}), access=OWNER)
        elif owner.key:
            await keys.update(owner.key, KeyChanges(limits=limits), access=OWNER)
        elif owner.model:
            await tenants.limit_model(owner.tenant, owner.model, limits, access=OWNER)
        else:
            await tenants.update(owner.tenant, TenantChanges(limits=limits), access=OWNER)

    async def change_something_else(self) -> None:
        """Change a tenant in what concerns no budget."""
        weight = TenantChanges(weight=self.chance.randrange(1, 10))
        await Tenants(self.database, self.clock).update(self.chance.choice(self.people).tenant.id, weight, access=OWNER)

    async def restart(self) -> None:
        """Forget everything that is not in the database."""
        self.budgets = euro_budget_alerts(self.database, self.clock, CALENDAR)

    async def alerts_sent(self, webhook_id: str) -> list[tuple[tuple[str, str, str], Due]]:
        """Return of whom a webhook was told what."""
        told = []
        for data in [message.payload["data"] for message in await self.alerts.messages() if message.webhook_id == webhook_id]:
            name = ("" if "key_id" in data else data.get("tenant_id", ""), data.get("key_id", ""), data.get("model", ""))
            if "month" in data:
                told.append((name, (data["month"], data["percent"], data["monthly_budget"] // 10**6)))
            else:
                told.append((name, (data["day"], data["percent"], data["tokens_per_day"])))
        return told


async def listeners(alerts: AlertParts, cast: Cast) -> dict[str, str]:
    """Return webhooks of the appliance, of Bob and of Charlie, and whose they are."""
    made = {}
    for tenant_id in (None, cast.bob.tenant.id, cast.charlie.tenant.id):
        webhook, _ = await alerts.webhooks.create(kind="webhook", target=TARGET, tenant_id=tenant_id, access=OWNER)
        made[webhook.id] = tenant_id or ""
    return made


async def everybody(database: Database, clock: FakeClock, cast: Cast) -> list[Person]:
    """Return Bob with two keys and Charlie, who is billed in francs, with percentages of their own."""
    for person, currency in ((cast.bob, "EUR"), (cast.charlie, "CHF")):
        changes = TenantChanges(alert_percents=list(PERCENTS), currency=currency)
        await Tenants(database, clock).update(person.tenant.id, changes, access=OWNER)
    key, secret = await Keys(database, clock, PEPPER).create(cast.bob.tenant.id, name="another", access=OWNER)
    return [cast.bob, Person(tenant=cast.bob.tenant, key=key, secret=secret), cast.charlie]


@pytest.mark.parametrize(("database_url", "seed"), EACH_SEED_ON_ONE_DATABASE, indirect=["database_url"])
async def test_every_crossing_alerts_each_subscriber_once(database: Database, clock: FakeClock, cast: Cast, seed: int) -> None:
    life = Life(database, clock, await everybody(database, clock, cast), seed)
    for owner in life.owners:
        owner.currency = "CHF" if owner.tenant == cast.charlie.tenant.id else "EUR"
        await life.limit(owner)
    heard_by = await listeners(life.alerts, cast)
    of_appliance = next(webhook_id for webhook_id, tenant_id in heard_by.items() if not tenant_id)
    for _ in range(STEPS):
        await life.step()
        assert set(await life.alerts_sent(of_appliance)) == {(owner.name, due) for owner in life.owners for due in owner.due}
    for webhook_id, tenant_id in heard_by.items():
        told = await life.alerts_sent(webhook_id)
        heard = [owner for owner in life.owners if tenant_id in ("", owner.tenant)]
        assert len(told) == len(set(told)), "told twice"
        assert set(told) == {(owner.name, due) for owner in heard for due in owner.due}
    assert any(owner.due for owner in life.owners), f"nothing happened from {START} on"
