"""Budget alerts of every owner of limits: tenants and keys, over all models or for one, and models over all tenants."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from appliance.base.db import Database
from appliance.metering.alerts.budgets import ALERTS_PER_TRANSACTION
from appliance.metering.alerts.outbox import Delivery
from appliance.metering.alerts.webhooks import Webhook
from appliance.metering.limits import owner_sums
from appliance.tenancy.access import WHOLE_APPLIANCE
from appliance.tenancy.keys import Keys
from appliance.tenancy.model_policies import ModelPolicies
from appliance.tenancy.principals import KeyChanges, Limits, TenantChanges
from appliance.tenancy.tenants import Tenants
from tests.support.alerts import TARGET, alert_parts
from tests.support.cast import PEPPER, Cast, Person
from tests.support.clock import FakeClock
from tests.support.spending import (
    PICOS,
    UNIT,
    Spender,
    alert_period_and_percent,
    record_statements,
    running_spender,
    set_budget,
)

OWNERS = ("tenant", "tenant for a model", "key", "key for a model", "model")
_SAYS = {"scope", "tenant_id", "tenant_name", "key_id", "key_name", "model"}
MONTH, DAY = "2026-11", "2026-11-21"
BOTH = [80, 100]


class Harness:
    """Bob's, Charlie's and the appliance's webhooks, and whose limits can be set."""

    def __init__(self, database: Database, clock: FakeClock, cast: Cast, spender: Spender, webhooks: list[Webhook]) -> None:
        self.tenants = Tenants(database, clock)
        self.keys = Keys(database, clock, PEPPER)
        self.models = ModelPolicies(database, clock)
        self.clock = clock
        self.bob = cast.bob
        self.charlie = cast.charlie
        self.spender = spender
        self.of_appliance, self.of_bob, self.of_charlie = webhooks

    async def limit(self, owner: str, *, model: str = "demo", **limits: int | None) -> None:
        """Set the limits of Bob, of his key, or of the model."""
        each = Limits(**limits)
        if owner == "model":
            await self.models.put(model, each)
        elif owner == "tenant":
            await self.tenants.update(self.bob.tenant.id, TenantChanges(limits=each), access=WHOLE_APPLIANCE)
        elif owner == "tenant for a model":
            await self.tenants.update(self.bob.tenant.id, TenantChanges(model_limits={model: each}), access=WHOLE_APPLIANCE)
        elif owner == "key":
            await self.keys.update(self.bob.key.id, KeyChanges(limits=each), access=WHOLE_APPLIANCE)
        else:
            await self.keys.update(self.bob.key.id, KeyChanges(model_limits={model: each}), access=WHOLE_APPLIANCE)

    async def another_key(self) -> Person:
        """Return Bob with another key."""
        key, secret = await self.keys.create(self.bob.tenant.id, name="another", access=WHOLE_APPLIANCE)
        return Person(tenant=self.bob.tenant, key=key, secret=secret)

    async def heard(self, webhook: Webhook | None = None) -> list[Delivery]:
        """Return what a webhook heard; that of the appliance hears everything."""
        messages = await self.spender.alerts.messages()
        return [message for message in messages if message.webhook_id == (webhook or self.of_appliance).id]

    async def alerts_sent(self, webhook: Webhook | None = None) -> list[tuple[str, int]]:
        """Return period and percentage of each message to a webhook."""
        return sorted(alert_period_and_percent(message) for message in await self.heard(webhook))


@pytest.fixture
async def harness(database: Database, clock: FakeClock, cast: Cast) -> AsyncIterator[Harness]:
    """A running ledger, and three webhooks."""
    alerts = alert_parts(database, clock)
    owners = (None, cast.bob.tenant.id, cast.charlie.tenant.id)
    webhooks = [
        (await alerts.webhooks.create(kind="webhook", target=TARGET, tenant_id=owner, access=WHOLE_APPLIANCE))[0]
        for owner in owners
    ]
    async with running_spender(alerts, cast.epoch_id) as spender:
        yield Harness(database, clock, cast, spender, webhooks)


def whose(harness: Harness, owner: str) -> dict[str, Any]:
    """Return what an alert says of its owner."""
    bob, key = harness.bob.tenant, harness.bob.key
    said: dict[str, Any] = {"scope": owner.split()[0]}
    if owner != "model":
        said |= {"tenant_id": bob.id, "tenant_name": bob.name}
    if "key" in owner:
        said |= {"key_id": key.id, "key_name": key.name}
    return said | ({"model": "demo"} if "model" in owner else {})


@pytest.mark.parametrize("owner", OWNERS)
async def test_every_owner_hears_of_each_threshold_of_its_budget_once(harness: Harness, owner: str) -> None:
    await harness.limit(owner, monthly_budget=100 * UNIT)
    for units, told in ((79, []), (1, [80]), (19, [80]), (1, BOTH), (50, BOTH)):
        await harness.spender.spend(harness.bob, units)
        assert await harness.alerts_sent() == [(MONTH, percent) for percent in told]
    first, _ = await harness.heard()
    assert first.event == "budget.threshold"
    money = {"month": MONTH, "monthly_budget": 100 * UNIT, "spent_picos": 80 * PICOS, "currency": "EUR"}
    assert first.payload["data"] == {**whose(harness, owner), "percent": 80, **money}


@pytest.mark.parametrize("owner", OWNERS)
async def test_every_owner_hears_of_each_threshold_of_its_tokens_of_the_day_once(harness: Harness, owner: str) -> None:
    await harness.limit(owner, tokens_per_day=100)
    for units in (79, 1, 19, 1):
        await harness.spender.spend(harness.bob, units)
    harness.clock.advance(86400)
    await harness.spender.spend(harness.bob, 80)
    assert await harness.alerts_sent() == [(DAY, 80), (DAY, 100), ("2026-11-22", 80)]
    first = (await harness.heard())[0]
    assert first.event == "tokens_per_day.threshold"
    tokens = {"day": DAY, "tokens_per_day": 100, "tokens": 80}
    assert first.payload["data"] == {**whose(harness, owner), "percent": 80, **tokens}


@pytest.mark.parametrize("owner", OWNERS)
async def test_what_counts_against_no_limit_of_an_owner_tells_it_nothing(harness: Harness, owner: str) -> None:
    await harness.limit(owner, monthly_budget=10 * UNIT, tokens_per_day=10)
    others = [(harness.charlie, "demo")] if owner != "model" else [(harness.charlie, "other")]
    if "key" in owner:
        others.append((await harness.another_key(), "demo"))
    if "for a model" in owner:
        others.append((harness.bob, "other"))
    for person, model in others:
        await harness.spender.spend(person, 100, model=model)
    await harness.spender.budgets.sweep()
    assert await harness.alerts_sent() == []


async def test_one_request_that_reaches_thresholds_of_all_owners_tells_of_each(harness: Harness) -> None:
    for owner in OWNERS:
        await harness.limit(owner, monthly_budget=10 * UNIT, tokens_per_day=10)
    await harness.spender.spend(harness.bob, 10)
    told = [(message.event, message.payload["data"]) for message in await harness.heard()]
    for owner in OWNERS:
        said = whose(harness, owner)
        of_owner = [
            (event, data["percent"]) for event, data in told if said == {name: data[name] for name in _SAYS & set(data)}
        ]
        assert sorted(of_owner) == [(f"{kind}.threshold", percent) for kind in ("budget", "tokens_per_day") for percent in BOTH]
    assert len(told) == len(OWNERS) * 4


async def test_a_tenant_hears_of_its_keys_and_only_the_appliance_of_what_all_use_of_a_model(harness: Harness) -> None:
    for owner in ("key", "model"):
        await harness.limit(owner, monthly_budget=10 * UNIT)
    await harness.spender.spend(harness.bob, 10)
    for webhook, scopes in (
        (harness.of_appliance, ["key", "key", "model", "model"]),
        (harness.of_bob, ["key", "key"]),
        (harness.of_charlie, []),
    ):
        assert sorted(message.payload["data"]["scope"] for message in await harness.heard(webhook)) == scopes


async def test_the_budget_of_a_model_is_what_all_tenants_spend_in_the_currency_of_the_appliance(
    harness: Harness, database: Database, clock: FakeClock
) -> None:
    await harness.limit("model", monthly_budget=100 * UNIT)
    for person, alert_percents in ((harness.bob, [1]), (harness.charlie, [])):
        await set_budget(database, clock, person, None, alert_percents=alert_percents)
    await harness.spender.spend(harness.bob, 40)
    assert await harness.alerts_sent() == []
    await harness.spender.spend(harness.charlie, 40)
    assert await harness.alerts_sent() == [(MONTH, 80)]


@pytest.mark.parametrize("owner", OWNERS)
async def test_money_in_another_currency_counts_against_no_budget(
    harness: Harness, database: Database, clock: FakeClock, cast: Cast, owner: str
) -> None:
    await harness.tenants.update(harness.bob.tenant.id, TenantChanges(currency="CHF"), access=WHOLE_APPLIANCE)
    await harness.limit(owner, monthly_budget=10 * UNIT)
    async with running_spender(harness.spender.alerts, cast.epoch_id, currency="CHF") as francs:
        await (francs if owner == "model" else harness.spender).spend(harness.bob, 100)
        await francs.budgets.sweep()
        assert await harness.alerts_sent() == []
        await (harness.spender if owner == "model" else francs).spend(harness.bob, 8)
    assert [message.payload["data"]["currency"] for message in await harness.heard()] == ["EUR" if owner == "model" else "CHF"]


async def test_keys_and_single_models_alert_at_the_percentages_of_their_tenant(
    harness: Harness, database: Database, clock: FakeClock
) -> None:
    await set_budget(database, clock, harness.bob, None, alert_percents=[50])
    await harness.limit("key", monthly_budget=10 * UNIT)
    await harness.limit("tenant for a model", monthly_budget=20 * UNIT)
    await harness.spender.spend(harness.bob, 5)
    assert await harness.alerts_sent() == [(MONTH, 50)]
    await harness.spender.spend(harness.bob, 5)
    assert await harness.alerts_sent() == [(MONTH, 50)] * 2
    await set_budget(database, clock, harness.bob, None, alert_percents=[])
    await harness.limit("key", monthly_budget=1 * UNIT)
    await harness.spender.spend(harness.bob, 5)
    await harness.spender.budgets.sweep()
    assert len(await harness.alerts_sent()) == 2


@pytest.mark.parametrize("owner", OWNERS)
async def test_another_limit_is_told_of_anew_and_by_the_sweep_where_nobody_settles(harness: Harness, owner: str) -> None:
    await harness.limit(owner, monthly_budget=100 * UNIT)
    await harness.spender.spend(harness.bob, 80)
    await harness.limit(owner, monthly_budget=1000 * UNIT)
    await harness.spender.spend(harness.bob, 719)
    assert await harness.alerts_sent() == [(MONTH, 80)]
    await harness.spender.spend(harness.bob, 1)
    assert await harness.alerts_sent() == [(MONTH, 80)] * 2
    await harness.limit(owner, monthly_budget=900 * UNIT)
    await harness.spender.budgets.sweep()
    assert await harness.alerts_sent() == [(MONTH, 80)] * 3
    await harness.limit(owner, monthly_budget=100 * UNIT)
    await harness.spender.budgets.sweep()
    assert await harness.alerts_sent() == [*[(MONTH, 80)] * 3, (MONTH, 100)]


@pytest.mark.parametrize("owner", OWNERS)
async def test_a_limit_that_is_taken_away_and_set_again_has_counted_what_came_between(harness: Harness, owner: str) -> None:
    for limit, units in ((100, 10), (None, 60), (100, 9)):
        await harness.limit(owner, monthly_budget=limit and limit * UNIT)
        await harness.spender.spend(harness.bob, units)
    assert await harness.alerts_sent() == []
    await harness.spender.spend(harness.bob, 1)
    assert await harness.alerts_sent() == [(MONTH, 80)]


@pytest.mark.parametrize("owner", OWNERS)
async def test_a_limit_of_nothing_alerts_nobody(harness: Harness, owner: str) -> None:
    await harness.limit(owner, monthly_budget=0, tokens_per_day=0)
    await harness.spender.spend(harness.bob, 10)
    await harness.spender.budgets.sweep()
    assert await harness.alerts_sent() == []


@pytest.mark.parametrize("owner", OWNERS)
async def test_a_webhook_that_is_new_hears_how_every_owner_stands(harness: Harness, owner: str) -> None:
    await harness.limit(owner, monthly_budget=10 * UNIT)
    await harness.spender.spend(harness.bob, 9)
    await harness.spender.budgets.sweep()
    late, _ = await harness.spender.alerts.webhooks.create(kind="email", target="ops@example.com", access=WHOLE_APPLIANCE)
    await harness.spender.budgets.sweep()
    assert await harness.alerts_sent(late) == await harness.alerts_sent() == [(MONTH, 80)]


@pytest.mark.parametrize("end", ["revoked", "expired", "archived"])
async def test_a_key_that_can_spend_no_more_alerts_nobody(harness: Harness, end: str) -> None:
    await harness.limit("key", monthly_budget=10 * UNIT)
    await harness.limit("key for a model", tokens_per_day=10)
    await harness.limit("tenant", monthly_budget=10 * UNIT)
    ran = await harness.spender.admit(harness.bob)
    if end == "revoked":
        await harness.keys.revoke(harness.bob.key.id, access=WHOLE_APPLIANCE)
    elif end == "archived":
        await harness.tenants.archive(harness.bob.tenant.id, access=WHOLE_APPLIANCE)
    else:
        await harness.keys.update(
            harness.bob.key.id, KeyChanges(expires_at=harness.clock.now() + timedelta(seconds=1)), access=WHOLE_APPLIANCE
        )
        harness.clock.advance(2)
    await harness.spender.settle(ran, 10)
    await harness.spender.budgets.sweep()
    scopes = [message.payload["data"]["scope"] for message in await harness.heard()]
    assert scopes == ([] if end == "archived" else ["tenant", "tenant"])


async def test_the_successor_of_a_rotated_key_has_a_budget_and_alerts_of_its_own(harness: Harness) -> None:
    await harness.limit("key", monthly_budget=10 * UNIT)
    await harness.spender.spend(harness.bob, 7)
    key, secret = await harness.keys.rotate(harness.bob.key.id, grace_s=60, access=WHOLE_APPLIANCE)
    successor = Person(tenant=harness.bob.tenant, key=key, secret=secret)
    await harness.spender.spend(successor, 7)
    assert await harness.alerts_sent() == []
    for person in (harness.bob, successor):
        await harness.spender.spend(person, 1)
    told = [message.payload["data"] for message in await harness.heard()]
    assert [(data["key_id"], data["key_name"], data["percent"]) for data in told] == [
        (each.id, harness.bob.key.name, 80) for each in (harness.bob.key, key)
    ]


@pytest.mark.parametrize("owner", ["tenant for a model", "key for a model", "model"])
async def test_models_with_long_and_alike_names_are_told_apart(harness: Harness, owner: str) -> None:
    names = [f"{'m' * 199}{last}" for last in "xy"]
    for model in names:
        await harness.limit(owner, model=model, monthly_budget=10 * UNIT, tokens_per_day=10)
        await harness.spender.spend(harness.bob, 8, model=model)
    told = [(message.event, message.payload["data"]["model"]) for message in await harness.heard()]
    assert sorted(told) == [(f"{kind}.threshold", model) for kind in ("budget", "tokens_per_day") for model in names]


async def test_what_was_told_of_a_tenant_by_an_earlier_version_is_not_told_again(harness: Harness, database: Database) -> None:
    await harness.limit("tenant", monthly_budget=10 * UNIT, tokens_per_day=10)
    tenant_id = harness.bob.tenant.id
    told = (
        ("budget.threshold", f"{tenant_id}:2026-11-01:80:{10 * PICOS}"),
        ("tokens_per_day.threshold", f"{tenant_id}:{DAY}:80:10"),
    )
    for event, subject in told:
        await harness.spender.alerts.enqueue(subject, tenant_id=tenant_id, event=event)
    await harness.spender.spend(harness.bob, 9)
    await harness.spender.budgets.sweep()
    assert [message.payload["data"] for message in await harness.heard()] == [{"subject": subject} for _, subject in told]


async def test_owners_without_a_budget_cost_no_statement(harness: Harness) -> None:
    await harness.limit("tenant", requests_per_minute=1000)
    await harness.limit("key", tokens_per_minute=10**6)
    for person in (harness.bob, harness.charlie):
        await harness.spender.spend(person, 1)
    with record_statements() as without:
        for person in (harness.bob, harness.charlie):
            await harness.spender.spend(person, 1)
    for owner in OWNERS:
        await harness.limit(owner, monthly_budget=10**6 * UNIT, tokens_per_day=10**6)
    for person in (harness.bob, harness.charlie):
        await harness.spender.spend(person, 1)
    with record_statements() as within:
        for person in (harness.bob, harness.charlie):
            await harness.spender.spend(person, 1)
    assert within == without
    assert not [statement for statement in without if "FROM usage_rollups" in statement or "model_policies" in statement]


async def test_a_look_at_many_owners_is_one_statement_a_period(harness: Harness) -> None:
    for owner in OWNERS:
        await harness.limit(owner, monthly_budget=10**6 * UNIT, tokens_per_day=10**6)
    with record_statements() as statements:
        await harness.spender.spend(harness.bob, 1)
    assert len([statement for statement in statements if "FROM usage_rollups" in statement]) == 2
    assert len([statement for statement in statements if "alert_percents" in statement or "model_policies" in statement]) == 3


async def test_a_sweep_tells_of_more_than_it_writes_at_once_and_the_next_writes_nothing(harness: Harness) -> None:
    count = ALERTS_PER_TRANSACTION // 2 + 1
    for number in range(count):
        await harness.models.put(f"m{number}", Limits(tokens_per_day=10))
        await harness.spender.spend(harness.bob, 1, model=f"m{number}")
    for number in range(count):
        await harness.models.put(f"m{number}", Limits(tokens_per_day=1))
    await harness.spender.budgets.sweep()
    assert len(await harness.alerts_sent()) == 2 * count
    await harness.tenants.update(harness.charlie.tenant.id, TenantChanges(weight=2), access=WHOLE_APPLIANCE)
    with record_statements() as statements:
        await harness.spender.budgets.sweep()
    assert not [statement for statement in statements if "outbox" in statement]


async def test_more_owners_than_a_statement_names_are_summed_all_the_same(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_sums, "IN_LIST_MAX", 0)
    await harness.limit("key", monthly_budget=10 * UNIT)
    await harness.spender.spend(harness.charlie, 100)
    await harness.spender.spend(harness.bob, 7)
    assert await harness.alerts_sent() == []
    await harness.spender.spend(harness.bob, 1)
    assert await harness.alerts_sent() == [(MONTH, 80)]
