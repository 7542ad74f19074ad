"""Budget alerts for every owner of limits: tenants and keys, over all models or for one, and models over all tenants."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from appliance.base.db import Database
from appliance.metering.alerts import budgets
from appliance.metering.alerts.outbox import Delivery
from appliance.metering.alerts.webhooks import Webhook
from appliance.metering.limits import owner_sums
from appliance.tenancy.keys import Keys
from appliance.tenancy.model_policies import ModelPolicies
from appliance.tenancy.principals import KeyChanges, Limits
from appliance.tenancy.tenants import Tenants
from tests.support.alerts import TARGET, alert_parts
from tests.support.cast import OWNER, PEPPER, Cast, Person, change_tenant
from tests.support.clock import FakeClock
from tests.support.spending import PICOS, UNIT, Spender, alert_period_and_percent, running_spender, set_budget
from tests.support.sql_statements import record_statements

OWNERS = ("tenant", "tenant for a model", "key", "key for a model", "model")
_OWNER_FIELDS = {"scope", "tenant_id", "tenant_name", "key_id", "key_name", "model"}
MONTH, DAY = "2026-11", "2026-11-21"
BOTH = [80, 100]


class Harness:
    """Webhooks of Bob, Charlie and the appliance, and setters for the limits of every owner."""

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
            await change_tenant(self.tenants, self.bob, limits=each)
        elif owner == "tenant for a model":
            await change_tenant(self.tenants, self.bob, model_limits={model: each})
        elif owner == "key":
            await self.keys.update(self.bob.key.id, KeyChanges(limits=each), access=OWNER)
        else:
            await self.keys.update(self.bob.key.id, KeyChanges(model_limits={model: each}), access=OWNER)

    async def another_key(self) -> Person:
        """Return Bob with another key."""
        key, secret = await self.keys.create(self.bob.tenant.id, name="another", access=OWNER)
        return Person(tenant=self.bob.tenant, key=key, secret=secret)

    async def received(self, webhook: Webhook | None = None) -> list[Delivery]:
        """Return the messages to a webhook, by default that of the appliance, which receives every alert."""
        messages = await self.spender.alerts.messages()
        return [message for message in messages if message.webhook_id == (webhook or self.of_appliance).id]

    async def alerts_sent(self, webhook: Webhook | None = None) -> list[tuple[str, int]]:
        """Return period and percentage of each message to a webhook."""
        return sorted(alert_period_and_percent(message) for message in await self.received(webhook))


@pytest.fixture
async def harness(database: Database, clock: FakeClock, cast: Cast) -> AsyncIterator[Harness]:
    """A running ledger, and three webhooks."""
    alerts = alert_parts(database, clock)
    owners = (None, cast.bob.tenant.id, cast.charlie.tenant.id)
    webhooks = [
        (await alerts.webhooks.create(kind="webhook", target=TARGET, tenant_id=owner, access=OWNER))[0] for owner in owners
    ]
    async with running_spender(alerts, cast.epoch_id) as spender:
        yield Harness(database, clock, cast, spender, webhooks)


def owner_fields(harness: Harness, owner: str) -> dict[str, Any]:
    """Return the fields of an alert that name its owner."""
    bob, key = harness.bob.tenant, harness.bob.key
    fields: dict[str, Any] = {"scope": owner.split()[0]}
    if owner != "model":
        fields |= {"tenant_id": bob.id, "tenant_name": bob.name}
    if "key" in owner:
        fields |= {"key_id": key.id, "key_name": key.name}
    return fields | ({"model": "demo"} if "model" in owner else {})


@pytest.mark.parametrize("owner", OWNERS)
async def test_each_threshold_of_an_owners_budget_alerts_once(harness: Harness, owner: str) -> None:
    await harness.limit(owner, monthly_budget=100 * UNIT)
    for units, percents in ((79, []), (1, [80]), (19, [80]), (1, BOTH), (50, BOTH)):
        await harness.spender.spend(harness.bob, units)
        assert await harness.alerts_sent() == [(MONTH, percent) for percent in percents]
    first, _ = await harness.received()
    assert first.event == "budget.threshold"
    money = {"month": MONTH, "monthly_budget": 100 * UNIT, "spent_picos": 80 * PICOS, "currency": "EUR"}
    assert first.payload["data"] == {**owner_fields(harness, owner), "percent": 80, **money}


@pytest.mark.parametrize("owner", OWNERS)
async def test_each_threshold_of_an_owners_tokens_per_day_alerts_once(harness: Harness, owner: str) -> None:
    await harness.limit(owner, tokens_per_day=100)
    for units in (79, 1, 19, 1):
        await harness.spender.spend(harness.bob, units)
    harness.clock.advance(86400)
    await harness.spender.spend(harness.bob, 80)
    assert await harness.alerts_sent() == [(DAY, 80), (DAY, 100), ("2026-11-22", 80)]
    first = (await harness.received())[0]
    assert first.event == "tokens_per_day.threshold"
    tokens = {"day": DAY, "tokens_per_day": 100, "tokens": 80}
    assert first.payload["data"] == {**owner_fields(harness, owner), "percent": 80, **tokens}


@pytest.mark.parametrize("owner", OWNERS)
async def test_usage_outside_an_owners_limits_does_not_alert(harness: Harness, owner: str) -> None:
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


async def test_one_request_that_reaches_thresholds_of_all_owners_alerts_for_each(harness: Harness) -> None:
    for owner in OWNERS:
        await harness.limit(owner, monthly_budget=10 * UNIT, tokens_per_day=10)
    await harness.spender.spend(harness.bob, 10)
    alerts = [(message.event, message.payload["data"]) for message in await harness.received()]
    for owner in OWNERS:
        expected = owner_fields(harness, owner)
        of_owner = [
            (event, data["percent"])
            for event, data in alerts
            if expected == {name: data[name] for name in _OWNER_FIELDS & set(data)}
        ]
        assert sorted(of_owner) == [(f"{kind}.threshold", percent) for kind in ("budget", "tokens_per_day") for percent in BOTH]
    assert len(alerts) == len(OWNERS) * 4


async def test_alerts_of_keys_go_to_their_tenant_and_alerts_of_models_only_to_the_appliance(harness: Harness) -> None:
    for owner in ("key", "model"):
        await harness.limit(owner, monthly_budget=10 * UNIT)
    await harness.spender.spend(harness.bob, 10)
    for webhook, scopes in (
        (harness.of_appliance, ["key", "key", "model", "model"]),
        (harness.of_bob, ["key", "key"]),
        (harness.of_charlie, []),
    ):
        assert sorted(message.payload["data"]["scope"] for message in await harness.received(webhook)) == scopes


async def test_the_budget_of_a_model_counts_all_tenants_at_default_percentages(
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
async def test_costs_in_another_currency_count_against_no_budget(
    harness: Harness, database: Database, clock: FakeClock, cast: Cast, owner: str
) -> None:
    await change_tenant(harness.tenants, harness.bob, currency="CHF")
    await harness.limit(owner, monthly_budget=10 * UNIT)
    async with running_spender(harness.spender.alerts, cast.epoch_id, currency="CHF") as francs:
        await (francs if owner == "model" else harness.spender).spend(harness.bob, 100)
        await francs.budgets.sweep()
        assert await harness.alerts_sent() == []
        await (harness.spender if owner == "model" else francs).spend(harness.bob, 8)
    assert [message.payload["data"]["currency"] for message in await harness.received()] == [
        "EUR" if owner == "model" else "CHF"
    ]


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
async def test_a_changed_limit_alerts_again_at_the_next_settlement_or_sweep(harness: Harness, owner: str) -> None:
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
async def test_a_limit_removed_and_set_again_counts_the_usage_in_between(harness: Harness, owner: str) -> None:
    for limit, units in ((100, 10), (None, 60), (100, 9)):
        await harness.limit(owner, monthly_budget=limit and limit * UNIT)
        await harness.spender.spend(harness.bob, units)
    assert await harness.alerts_sent() == []
    await harness.spender.spend(harness.bob, 1)
    assert await harness.alerts_sent() == [(MONTH, 80)]


@pytest.mark.parametrize("owner", OWNERS)
async def test_a_limit_of_zero_does_not_alert(harness: Harness, owner: str) -> None:
    await harness.limit(owner, monthly_budget=0, tokens_per_day=0)
    await harness.spender.spend(harness.bob, 10)
    await harness.spender.budgets.sweep()
    assert await harness.alerts_sent() == []


@pytest.mark.parametrize("owner", OWNERS)
async def test_a_new_webhook_receives_the_alerts_already_due_for_an_owner(harness: Harness, owner: str) -> None:
    await harness.limit(owner, monthly_budget=10 * UNIT)
    await harness.spender.spend(harness.bob, 9)
    await harness.spender.budgets.sweep()
    late, _ = await harness.spender.alerts.webhooks.create(kind="email", target="ops@example.com", access=OWNER)
    await harness.spender.budgets.sweep()
    assert await harness.alerts_sent(late) == await harness.alerts_sent() == [(MONTH, 80)]


@pytest.mark.parametrize("end", ["revoked", "expired", "archived"])
async def test_a_key_that_can_no_longer_be_used_does_not_alert(harness: Harness, end: str) -> None:
    await harness.limit("key", monthly_budget=10 * UNIT)
    await harness.limit("key for a model", tokens_per_day=10)
    await harness.limit("tenant", monthly_budget=10 * UNIT)
    running = await harness.spender.admit(harness.bob)
    if end == "revoked":
        await harness.keys.revoke(harness.bob.key.id, access=OWNER)
    elif end == "archived":
        await harness.tenants.archive(harness.bob.tenant.id, access=OWNER)
    else:
        await harness.keys.update(
            harness.bob.key.id, KeyChanges(expires_at=harness.clock.now() + timedelta(seconds=1)), access=OWNER
        )
        harness.clock.advance(2)
    await harness.spender.settle(running, 10)
    await harness.spender.budgets.sweep()
    scopes = [message.payload["data"]["scope"] for message in await harness.received()]
    assert scopes == ([] if end == "archived" else ["tenant", "tenant"])


async def test_the_successor_of_a_rotated_key_has_a_budget_and_alerts_of_its_own(harness: Harness) -> None:
    await harness.limit("key", monthly_budget=10 * UNIT)
    await harness.spender.spend(harness.bob, 7)
    key, secret = await harness.keys.rotate(harness.bob.key.id, grace_s=60, access=OWNER)
    successor = Person(tenant=harness.bob.tenant, key=key, secret=secret)
    await harness.spender.spend(successor, 7)
    assert await harness.alerts_sent() == []
    for person in (harness.bob, successor):
        await harness.spender.spend(person, 1)
    alerts = [message.payload["data"] for message in await harness.received()]
    assert [(data["key_id"], data["key_name"], data["percent"]) for data in alerts] == [
        (each.id, harness.bob.key.name, 80) for each in (harness.bob.key, key)
    ]


@pytest.mark.parametrize("owner", ["tenant for a model", "key for a model", "model"])
async def test_models_with_long_and_similar_names_have_alerts_of_their_own(harness: Harness, owner: str) -> None:
    names = [f"{'m' * 199}{last}" for last in "xy"]
    for model in names:
        await harness.limit(owner, model=model, monthly_budget=10 * UNIT, tokens_per_day=10)
        await harness.spender.spend(harness.bob, 8, model=model)
    alerts = [(message.event, message.payload["data"]["model"]) for message in await harness.received()]
    assert sorted(alerts) == [(f"{kind}.threshold", model) for kind in ("budget", "tokens_per_day") for model in names]


async def test_alerts_of_a_tenant_sent_by_an_earlier_version_are_not_repeated(harness: Harness, database: Database) -> None:
    await harness.limit("tenant", monthly_budget=10 * UNIT, tokens_per_day=10)
    tenant_id = harness.bob.tenant.id
    sent_earlier = (
        ("budget.threshold", f"{tenant_id}:2026-11-01:80:{10 * PICOS}"),
        ("tokens_per_day.threshold", f"{tenant_id}:{DAY}:80:10"),
    )
    for event, subject in sent_earlier:
        await harness.spender.alerts.enqueue(subject, tenant_id=tenant_id, event=event)
    await harness.spender.spend(harness.bob, 9)
    await harness.spender.budgets.sweep()
    assert [message.payload["data"] for message in await harness.received()] == [
        {"subject": subject} for _, subject in sent_earlier
    ]


async def test_owners_without_a_budget_need_no_statement(harness: Harness) -> None:
    await harness.limit("tenant", requests_per_minute=1000)
    await harness.limit("key", tokens_per_minute=10**6)
    for person in (harness.bob, harness.charlie):
        await harness.spender.spend(person, 1)
    with record_statements() as without_budgets:
        for person in (harness.bob, harness.charlie):
            await harness.spender.spend(person, 1)
    for owner in OWNERS:
        await harness.limit(owner, monthly_budget=10**6 * UNIT, tokens_per_day=10**6)
    for person in (harness.bob, harness.charlie):
        await harness.spender.spend(person, 1)
    with record_statements() as with_budgets:
        for person in (harness.bob, harness.charlie):
            await harness.spender.spend(person, 1)
    assert with_budgets == without_budgets
    assert not [
        statement for statement in without_budgets if "FROM usage_rollups" in statement or "model_policies" in statement
    ]


async def test_a_check_of_many_owners_is_one_statement_per_period(harness: Harness) -> None:
    for owner in OWNERS:
        await harness.limit(owner, monthly_budget=10**6 * UNIT, tokens_per_day=10**6)
    with record_statements() as statements:
        await harness.spender.spend(harness.bob, 1)
    assert len([statement for statement in statements if "FROM usage_rollups" in statement]) == 2
    assert len([statement for statement in statements if "alert_percents" in statement or "model_policies" in statement]) == 3


async def test_a_sweep_enqueues_more_alerts_than_fit_a_transaction_and_the_next_sweep_none(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "ALERTS_PER_TRANSACTION", 4)
    count = 3  # models, each with two alerts
    for number in range(count):
        await harness.models.put(f"m{number}", Limits(tokens_per_day=10))
        await harness.spender.spend(harness.bob, 1, model=f"m{number}")
    for number in range(count):
        await harness.models.put(f"m{number}", Limits(tokens_per_day=1))
    await harness.spender.budgets.sweep()
    assert len(await harness.alerts_sent()) == 2 * count
    await change_tenant(harness.tenants, harness.charlie, weight=2)
    with record_statements() as statements:
        await harness.spender.budgets.sweep()
    assert not [statement for statement in statements if "outbox" in statement]


async def test_more_owners_than_a_statement_can_list_are_summed_correctly(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_sums, "IN_LIST_MAX", 0)
    await harness.limit("key", monthly_budget=10 * UNIT)
    await harness.spender.spend(harness.charlie, 100)
    await harness.spender.spend(harness.bob, 7)
    assert await harness.alerts_sent() == []
    await harness.spender.spend(harness.bob, 1)
    assert await harness.alerts_sent() == [(MONTH, 80)]
