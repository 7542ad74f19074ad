"""Tenants: created, changed field by field, archived, and never deleted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from appliance.base.db import Database
from appliance.base.errors import Conflict, InvalidValue, NameTaken, NotFound
from appliance.tenancy.fields import LIMIT_MAX
from appliance.tenancy.principals import LIMIT_NAMES, Limits, TenantChanges
from appliance.tenancy.tenants import Tenants
from tests.support.case_ids import case_id
from tests.support.cast import OWNER
from tests.support.clock import FakeClock

ALL_LIMITS = Limits(tokens_per_minute=1, requests_per_minute=2, concurrent_requests=3, tokens_per_day=4, monthly_budget=5)


@pytest.fixture
def tenants(database: Database, clock: FakeClock) -> Tenants:
    return Tenants(database, clock)


async def test_a_tenant_is_read_as_it_was_created(tenants: Tenants, clock: FakeClock) -> None:
    terms = TenantChanges(tier="batch", weight=7, limits=ALL_LIMITS, allowed_models=["a", "b", "a"])
    made = await tenants.create("  Zoë & Søn ", terms, access=OWNER)
    assert made == await tenants.get(made.id, access=OWNER) == await tenants.find("Zoë & Søn", access=OWNER)
    assert (made.name, made.allowed_models, made.created_at) == ("Zoë & Søn", ("a", "b"), clock.now())
    assert not made.suspended
    assert not made.archived


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"name": ""}, "name"),
        ({"name": "   "}, "name"),
        ({"name": "x" * 201}, "name"),
        ({"name": "a\x00b"}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": "\ud800"}, "name"),
        ({"name": 5}, "name"),
        ({"tier": "gold"}, "tier"),
        ({"weight": 0}, "weight"),
        ({"weight": True}, "weight"),
        ({"weight": 1.5}, "weight"),
        ({"allowed_models": "demo"}, "allowed_models"),
        ({"allowed_models": ["demo", 3]}, "allowed_models"),
    ],
    ids=case_id,
)
async def test_an_invalid_field_is_named_in_create_and_update(tenants: Tenants, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        await tenants.create(changes.get("name", "bob"), TenantChanges(**changes), access=OWNER)
    assert refused.value.param == param
    bob = await tenants.create(name="bob", access=OWNER)
    with pytest.raises(InvalidValue) as refused:
        await tenants.update(bob.id, TenantChanges(**changes), access=OWNER)
    assert refused.value.param == param
    assert await tenants.get(bob.id, access=OWNER) == bob


@pytest.mark.parametrize("name", LIMIT_NAMES)
@pytest.mark.parametrize("value", [-1, LIMIT_MAX + 1, 1.5, True, "5"])
def test_an_invalid_limit_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidValue) as refused:
        Limits(**{name: value})
    assert refused.value.param == f"limits.{name}"


async def test_an_unknown_limit_is_named(tenants: Tenants) -> None:
    bob = await tenants.create(name="bob", access=OWNER)
    with pytest.raises(InvalidValue) as refused:
        await tenants.update(bob.id, TenantChanges(limits={"tokens_per_second": 5}), access=OWNER)
    assert refused.value.param == "limits.tokens_per_second"


async def test_an_update_changes_only_the_given_fields(tenants: Tenants) -> None:
    bob = await tenants.create("bob", TenantChanges(limits=ALL_LIMITS, allowed_models=["demo"]), access=OWNER)
    changed = await tenants.update(bob.id, TenantChanges(limits={"tokens_per_day": None}, suspended=True), access=OWNER)
    assert changed.limits == Limits(tokens_per_minute=1, requests_per_minute=2, concurrent_requests=3, monthly_budget=5)
    assert (changed.suspended, changed.allowed_models, changed.name) == (True, ("demo",), "bob")
    replaced = await tenants.update(
        bob.id, TenantChanges(limits=Limits(tokens_per_minute=9), allowed_models=None), access=OWNER
    )
    assert replaced.limits == Limits(tokens_per_minute=9)
    assert replaced.allowed_models is None
    assert await tenants.update(bob.id, TenantChanges(), access=OWNER) == replaced


async def test_a_limit_for_a_model_affects_one_tenant_and_model(tenants: Tenants) -> None:
    bob, charlie = [await tenants.create(name=name, access=OWNER) for name in ("bob", "charlie")]
    for model, changes in (
        ("large", {"tokens_per_day": 5}),
        ("tiny", {"tokens_per_day": 7}),
        ("tiny", {"concurrent_requests": 2}),
    ):
        bob = await tenants.limit_model(bob.id, model, changes, access=OWNER)

    wanted = {"large": Limits(tokens_per_day=5), "tiny": Limits(tokens_per_day=7, concurrent_requests=2)}
    assert bob.model_limits == wanted
    assert await tenants.get(charlie.id, access=OWNER) == charlie
    archived = await tenants.archive(bob.id, access=OWNER)
    with pytest.raises(Conflict, match="archived"):
        await tenants.limit_model(bob.id, "tiny", {"tokens_per_day": None}, access=OWNER)
    assert await tenants.get(bob.id, access=OWNER) == archived


async def test_concurrent_updates_of_different_fields_are_both_kept(tenants: Tenants) -> None:
    bob = await tenants.create(name="bob", access=OWNER)
    await asyncio.gather(*(tenants.update(bob.id, TenantChanges(limits={name: 7}), access=OWNER) for name in LIMIT_NAMES))
    assert (await tenants.get(bob.id, access=OWNER)).limits == Limits(**dict.fromkeys(LIMIT_NAMES, 7))


@pytest.mark.parametrize("twin", ["BOB", "\uff42ob", "b\u200dob", "bo\u200eb"], ids=ascii)
async def test_a_name_that_looks_like_another_is_refused(tenants: Tenants, twin: str) -> None:
    bob, charlie = (
        await tenants.create(name="bob", access=OWNER),
        await tenants.create(name="charlie", access=OWNER),
    )
    with pytest.raises(NameTaken, match="there is a tenant named 'bob' already"):
        await tenants.create(name=twin, access=OWNER)
    with pytest.raises(NameTaken):
        await tenants.update(charlie.id, TenantChanges(name=twin), access=OWNER)
    assert (await tenants.update(bob.id, TenantChanges(name="Bob"), access=OWNER)).name == "Bob"
    await tenants.archive(bob.id, access=OWNER)
    with pytest.raises(NameTaken, match="there is an archived tenant, whose invoices keep its name, named 'Bob' already"):
        await tenants.create(name="bob", access=OWNER)


async def test_a_name_can_belong_to_only_one_tenant(tenants: Tenants) -> None:
    bob, charlie = (
        await tenants.create(name="bob", access=OWNER),
        await tenants.create(name="charlie", access=OWNER),
    )
    with pytest.raises(NameTaken):
        await tenants.create(name=" bob", access=OWNER)
    with pytest.raises(NameTaken):
        await tenants.update(charlie.id, TenantChanges(name="bob"), access=OWNER)
    assert (await tenants.update(bob.id, TenantChanges(name="bob"), access=OWNER)).name == "bob"


async def test_a_tenant_is_found_by_its_exact_name(tenants: Tenants) -> None:
    bob, charlie = [await tenants.create(name=name, access=OWNER) for name in ("bob", "charlie")]
    assert [await tenants.find(name, access=OWNER) for name in ("bob", " charlie ", "bo")] == [bob, charlie, None]


async def test_the_currencies_are_those_of_active_tenants(tenants: Tenants) -> None:
    for name, currency in (("bob", None), ("charlie", "CHF"), ("dora", "CHF"), ("erin", "USD")):
        last = await tenants.create(name, TenantChanges(currency=currency), access=OWNER)
    await tenants.archive(last.id, access=OWNER)
    assert await tenants.currencies("EUR") == ["CHF", "EUR"]


async def test_an_archived_tenant_is_kept_and_cannot_be_changed(tenants: Tenants) -> None:
    bob = await tenants.create(name="bob", access=OWNER)
    archived = await tenants.archive(bob.id, access=OWNER)
    assert archived.archived
    assert await tenants.archive(bob.id, access=OWNER) == archived == await tenants.get(bob.id, access=OWNER)
    with pytest.raises(Conflict, match="archived"):
        await tenants.update(bob.id, TenantChanges(weight=5), access=OWNER)
    assert (await tenants.get(bob.id, access=OWNER)).weight == 1
    assert (await tenants.list(access=OWNER)).data == []
    assert (await tenants.list(include_archived=True, access=OWNER)).data == [archived]


async def test_an_unknown_tenant_is_not_found(tenants: Tenants) -> None:
    with pytest.raises(NotFound):
        await tenants.get("tn_nobody", access=OWNER)
    with pytest.raises(NotFound):
        await tenants.update("tn_nobody", TenantChanges(weight=5), access=OWNER)
    with pytest.raises(NotFound):
        await tenants.archive("tn_nobody", access=OWNER)
    assert await tenants.find("nobody", access=OWNER) is None


async def test_the_list_is_filtered_by_literal_text_in_names(tenants: Tenants) -> None:
    for name in ("100 % sure", "Sure thing", "bob"):
        await tenants.create(name=name, access=OWNER)
    for text, names in (("SURE", ["100 % sure", "Sure thing"]), ("% s", ["100 % sure"]), ("_", [])):
        assert [tenant.name for tenant in (await tenants.list(text=text, access=OWNER)).data] == names


async def test_paging_returns_every_tenant_once(tenants: Tenants) -> None:
    made = {(await tenants.create(name=f"tenant {number}", access=OWNER)).id for number in range(7)}
    seen: list[str] = []
    cursor = None
    while True:
        page = await tenants.list(3, cursor, access=OWNER)
        seen += [tenant.id for tenant in page.data]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert set(seen) == made
    assert len(seen) == 7
