"""Settings of tenants, keys, tiers and models, above all their limits. An invalid value is refused by name with its bounds."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.base.db import Database
from appliance.base.errors import InvalidValue, NotFound
from appliance.tenancy import model_policies
from appliance.tenancy.fields import LIMIT_MAX
from appliance.tenancy.keys import Keys
from appliance.tenancy.model_policies import ModelPolicies
from appliance.tenancy.principals import KeyChanges, Limits, TenantChanges
from appliance.tenancy.tenants import Tenants
from appliance.tenancy.tiers import ADMISSION_WAIT_MS_MAX, Tiers
from tests.support.case_ids import case_id
from tests.support.cast import OWNER, PEPPER, Cast
from tests.support.clock import FakeClock
from tests.support.factories import pending, posted
from tests.support.ledgers import running_ledger

LOCALHOST = "127.0.0.1"
INVALID_LIMITS = (-1, LIMIT_MAX + 1, 1.5, True, "7", 2**80)


@pytest.fixture
def tenants(database: Database, clock: FakeClock) -> Tenants:
    return Tenants(database, clock)


@pytest.fixture
def keys(database: Database, clock: FakeClock) -> Keys:
    return Keys(database, clock, PEPPER)


async def test_a_tenant_is_created_with_every_setting(tenants: Tenants) -> None:
    settings: dict[str, Any] = {
        "model_limits": {"large": Limits(tokens_per_minute=10), "small": Limits(concurrent_requests=2, monthly_budget=5)},
        "limit_mode": "shadow",
        "cut_at_budget": True,
        "currency": "CHF",
        "billing": {"name": "Dora AG", "address": "Gasse 1\n8000 Zürich", "tax_id": "CHE-1"},
        "alert_percents": (50, 100),
        "suspended": True,
    }
    made = await tenants.create("dora", TenantChanges(**settings), access=OWNER)

    assert {name: getattr(made, name) for name in settings} == settings
    assert await tenants.get(made.id, access=OWNER) == made


async def test_models_without_any_limit_are_not_stored(tenants: Tenants, keys: Keys) -> None:
    """They are missing both in the result of creation and when read later."""
    settings: dict[str, dict[str, int | None]] = {"m": {}, "n": {"tokens_per_day": None}, "o": {"tokens_per_day": 7}}
    tenant = await tenants.create("dora", TenantChanges(model_limits=settings), access=OWNER)
    key, _ = await keys.create(tenant.id, "key", KeyChanges(model_limits=settings), access=OWNER)

    assert tenant.model_limits == key.model_limits == {"o": Limits(tokens_per_day=7)}
    assert await tenants.get(tenant.id, access=OWNER) == tenant
    assert await keys.get(key.id, access=OWNER) == key


@pytest.mark.parametrize(
    ("field", "value", "stored"),
    [
        ("model_limits", {"m": {"tokens_per_minute": 5, "tokens_per_day": None}}, {"m": Limits(tokens_per_minute=5)}),
        ("model_limits", None, {}),
        ("limit_mode", "shadow", "shadow"),
        ("cut_at_budget", True, True),
        ("currency", "USD", "USD"),
        ("currency", None, None),
        ("billing", {"name": "Bob GmbH", "email": None}, {"name": "Bob GmbH"}),
        ("billing", {"address": " A 1 \r\n B "}, {"address": "A 1\nB"}),
        ("billing", None, None),
        ("alert_percents", [100, 80, 80], (80, 100)),
        ("alert_percents", [], ()),
        ("alert_percents", None, None),
    ],
    ids=case_id,
)
async def test_each_field_of_a_tenant_can_be_changed_alone(
    tenants: Tenants, cast: Cast, field: str, value: object, stored: object
) -> None:
    before = await tenants.get(cast.bob.tenant.id, access=OWNER)
    after = await tenants.update(cast.bob.tenant.id, TenantChanges(**{field: value}), access=OWNER)  # type: ignore[arg-type]

    assert getattr(after, field) == stored
    unlike = [name for name in before.__slots__ if name != field and getattr(before, name) != getattr(after, name)]
    assert unlike == []


@pytest.mark.parametrize(
    ("field", "value", "param", "words"),
    [
        ("limit_mode", "off", "limit_mode", "enforce, shadow"),
        ("cut_at_budget", 1, "cut_at_budget", "true or false"),
        ("suspended", "yes", "suspended", "true or false"),
        ("currency", "eur", "currency", "three capital letters"),
        ("currency", "EURO", "currency", "three capital letters"),
        ("billing", {"street": "x"}, "billing.street", "address"),
        ("billing", {"name": ""}, "billing.name", "1 to 200"),
        ("billing", {"address": "x" * 1001}, "billing.address", "1000"),
        ("billing", {"address": "a\n\nb"}, "billing.address", "1 to 200"),
        ("billing", ["x"], "billing", "object"),
        ("alert_percents", [0], "alert_percents", "1 to 1000"),
        ("alert_percents", [1001], "alert_percents", "1 to 1000"),
        ("alert_percents", [80.5], "alert_percents", "whole number"),
        ("alert_percents", list(range(1, 12)), "alert_percents", "at most 10"),
        ("alert_percents", "80", "alert_percents", "list"),
        ("model_limits", {"m": {"speed": 1}}, "model_limits.m.speed", "not a limit"),
        ("model_limits", {"m": 5}, "model_limits.m", "object"),
        ("model_limits", {"": {}}, "model_limits", "1 to 200"),
        ("model_limits", {f"m{number}": {} for number in range(101)}, "model_limits", "at most 100"),
        ("model_limits", [], "model_limits", "at most 100"),
        ("weight", 0, "weight", "1 to 1000"),
        ("tier", "gold", "tier", "interactive"),
    ],
    ids=case_id,
)
async def test_an_invalid_field_of_a_tenant_is_refused_with_its_bounds(
    tenants: Tenants, cast: Cast, field: str, value: object, param: str, words: str
) -> None:
    with pytest.raises(InvalidValue, match=words) as refused:
        await tenants.update(cast.bob.tenant.id, TenantChanges(**{field: value}), access=OWNER)  # type: ignore[arg-type]

    assert refused.value.param == param
    assert await tenants.get(cast.bob.tenant.id, access=OWNER) == cast.bob.tenant


@pytest.mark.parametrize("value", INVALID_LIMITS)
@pytest.mark.parametrize("name", [*Limits.__slots__])
async def test_an_invalid_limit_is_refused_for_tenants_keys_and_models(
    tenants: Tenants, keys: Keys, cast: Cast, name: str, value: Any
) -> None:
    at_tenant = TenantChanges(limits={name: value})
    at_key = KeyChanges(limits={name: value})
    at_model = KeyChanges(model_limits={"m": {name: value}})
    refused_calls = [
        (tenants.update(cast.bob.tenant.id, at_tenant, access=OWNER), f"limits.{name}"),
        (keys.update(cast.bob.key.id, at_key, access=OWNER), f"limits.{name}"),
        (keys.update(cast.bob.key.id, at_model, access=OWNER), f"model_limits.m.{name}"),
        (
            tenants.create("x", TenantChanges(model_limits={"m": {name: value}}), access=OWNER),
            f"model_limits.m.{name}",
        ),
    ]
    for call, param in refused_calls:
        with pytest.raises(InvalidValue, match=f"from 0 to {LIMIT_MAX}") as refused:
            await call

        assert refused.value.param == param


async def test_the_currency_is_fixed_by_the_first_request(
    tenants: Tenants, cast: Cast, database: Database, clock: FakeClock
) -> None:
    await tenants.update(cast.bob.tenant.id, TenantChanges(currency="USD"), access=OWNER)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        entry = pending(cast.bob)
        await ledger.open(entry)
        await ledger.settle(posted(entry.request_id))
    with pytest.raises(InvalidValue, match="cannot be changed after the first request") as refused:
        await tenants.update(cast.bob.tenant.id, TenantChanges(currency="CHF", weight=7), access=OWNER)

    assert refused.value.param == "currency"
    bob = await tenants.update(cast.bob.tenant.id, TenantChanges(currency="USD", weight=5), access=OWNER)
    assert (bob.currency, bob.weight) == ("USD", 5)
    assert (await tenants.update(cast.charlie.tenant.id, TenantChanges(currency="CHF"), access=OWNER)).currency == "CHF"


async def test_a_tenant_without_a_currency_can_be_fixed_to_that_of_its_usage(
    tenants: Tenants, cast: Cast, database: Database, clock: FakeClock
) -> None:
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        entry = pending(cast.bob)
        await ledger.open(entry)
        await ledger.settle(posted(entry.request_id))
    with pytest.raises(InvalidValue, match="from null to one that the usage has"):
        await tenants.update(cast.bob.tenant.id, TenantChanges(currency="CHF"), access=OWNER)
    assert (await tenants.update(cast.bob.tenant.id, TenantChanges(currency="EUR"), access=OWNER)).currency == "EUR"
    with pytest.raises(InvalidValue, match="cannot be changed after the first request"):
        await tenants.update(cast.bob.tenant.id, TenantChanges(currency=None), access=OWNER)


async def test_a_key_has_limits_for_single_models_and_passes_them_to_its_successor(keys: Keys, cast: Cast) -> None:
    terms = KeyChanges(model_limits={"m": {"requests_per_minute": 3}}, limit_mode="shadow", scopes=["usage"])
    key, secret = await keys.create(cast.bob.tenant.id, "k", terms, access=OWNER)
    known = (await keys.authenticate(secret, LOCALHOST)).key

    assert known.model_limits == {"m": Limits(requests_per_minute=3)}
    assert (known.limit_mode, known.scopes) == ("shadow", ("usage",))
    successor, _ = await keys.rotate(key.id, access=OWNER)
    assert (successor.model_limits, successor.limit_mode) == (known.model_limits, "shadow")


async def test_a_changed_tier_applies_to_the_next_request(database: Database, clock: FakeClock) -> None:
    tiers = Tiers(database, clock)
    assert [(tier.name, tier.admission_wait_ms) for tier in await tiers.list()] == [
        ("interactive", 0),
        ("standard", 0),
        ("batch", 0),
    ]
    for wait_ms in (250, 500):
        assert (await tiers.update("batch", admission_wait_ms=wait_ms)).admission_wait_ms == wait_ms
        assert (await tiers.get("batch")).admission_wait_ms == wait_ms
    assert (await Tiers(database, clock).get("batch")).admission_wait_ms == 500
    invalid_waits: list[Any] = [-1, ADMISSION_WAIT_MS_MAX + 1, True, 0.5]
    for wait_ms in invalid_waits:
        with pytest.raises(InvalidValue, match=f"from 0 to {ADMISSION_WAIT_MS_MAX}") as refused:
            await tiers.update("batch", admission_wait_ms=wait_ms)
        assert refused.value.param == "admission_wait_ms"
    with pytest.raises(NotFound, match="interactive, standard, batch"):
        await tiers.update("gold", admission_wait_ms=1)


async def test_limits_of_a_model_apply_until_they_are_removed(
    database: Database, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = ModelPolicies(database, clock)
    assert await policies.find("org/large") is None
    await policies.put("org/large", Limits(tokens_per_minute=5, requests_per_minute=1))
    changed = await policies.put("org/large", Limits(tokens_per_minute=7), "shadow")

    assert await policies.find("org/large") == changed
    assert (changed.limits, changed.limit_mode) == (Limits(tokens_per_minute=7), "shadow")
    assert await ModelPolicies(database, clock).list() == [changed]
    monkeypatch.setattr(model_policies, "MODELS_MAX", 1)
    with pytest.raises(InvalidValue, match="at most 1 models"):
        await policies.put("another", Limits())
    assert await policies.remove("org/large") == changed
    assert await policies.find("org/large") is None
    with pytest.raises(NotFound):
        await policies.remove("org/large")
    with pytest.raises(InvalidValue, match="enforce, shadow"):
        await policies.put("m", Limits(), "off")
