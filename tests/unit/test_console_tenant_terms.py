"""Terms of a tenant in the console: limit mode, currency, alerts, billing address, model limits and free allowance."""

from __future__ import annotations

import pytest

from appliance.tenancy.principals import Limits, Tenant
from tests.support.cast import OWNER
from tests.support.clock import START
from tests.support.console_fixtures import ConsoleApp

TERMS = {"limit_mode": "shadow", "currency": "USD", "alert_percents": "50, 90 %", "cut_at_budget": "yes", "name": "Bob Ltd"}


async def bob_as_stored(console: ConsoleApp) -> Tenant:
    return await console.services.tenants.get(console.cast.bob.tenant.id, access=OWNER)


async def test_terms_are_saved_and_shown_on_the_tenant_s_page(console: ConsoleApp) -> None:
    alice, bob = await console.alice(), console.cast.bob.tenant
    answer = await alice.post(f"/tenants/{bob.id}/terms", **TERMS, address="1 Long Lane\r\nBristol")
    assert answer.headers["location"] == f"/tenants/{bob.id}"
    saved = await bob_as_stored(console)
    assert (saved.limit_mode, saved.currency, saved.alert_percents, saved.cut_at_budget) == ("shadow", "USD", (50, 90), True)
    assert saved.billing == {"name": "Bob Ltd", "address": "1 Long Lane\nBristol"}
    page = (await alice.get(f"/tenants/{bob.id}")).text
    for text in ("shadow mode", "running requests are cut off", "USD", "50\u00a0%, 90&nbsp;% of budgets", "Bob Ltd"):
        assert text in page


@pytest.mark.parametrize(("typed", "meant"), [("", None), ("none", ()), ("100", (100,))])
async def test_an_empty_alert_field_means_the_default_and_none_means_no_alerts(
    console: ConsoleApp, typed: str, meant: tuple[int, ...] | None
) -> None:
    alice, bob = await console.alice(), console.cast.bob.tenant
    await alice.post(f"/tenants/{bob.id}/terms", **{**TERMS, "alert_percents": typed})
    assert (await bob_as_stored(console)).alert_percents == meant


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"limit_mode": "maybe"}, "Choose one of"),
        ({"currency": "dollars"}, "urrency"),
        ({"alert_percents": "half"}, "Enter percentages like 80, 100"),
        ({"alert_percents": "0"}, "from 1 to 1000"),
        ({"name": "x" * 201}, "1 to 200 characters"),
    ],
)
async def test_invalid_terms_are_refused_and_change_nothing(console: ConsoleApp, change: dict[str, str], sentence: str) -> None:
    alice, before = await console.alice(), await bob_as_stored(console)
    answer = await alice.post(f"/tenants/{before.id}/terms", **{**TERMS, **change})
    assert answer.status_code == 422
    assert sentence in answer.text
    assert await bob_as_stored(console) == before


async def test_limits_per_model_are_saved_and_removed_when_all_are_empty(console: ConsoleApp) -> None:
    alice, bob = await console.alice(), console.cast.bob.tenant
    path = f"/tenants/{bob.id}/model-limits"
    assert '<option value="demo"></option>' in (await alice.fragment(path)).text
    await alice.post(path, model="demo/large", tokens_per_minute="5,000")
    assert (await bob_as_stored(console)).model_limits == {"demo/large": Limits(tokens_per_minute=5000)}
    page = (await alice.get(f"/tenants/{bob.id}")).text
    assert f"{path}?model=demo/large" in page
    assert 'value="5000"' in (await alice.fragment(f"{path}?model=demo/large")).text
    await alice.post(path, model="demo/large")
    assert (await bob_as_stored(console)).model_limits == {}


async def test_the_free_allowance_is_shown_only_to_members_who_may_read_invoices(console: ConsoleApp) -> None:
    alice, bob = await console.alice(), console.cast.bob.tenant
    page = f"/tenants/{bob.id}"
    manager, developer = [await console.member_of(console.cast.bob, role) for role in ("manager", "developer")]
    assert "Free allowance" not in (await alice.get(page)).text

    allowances = console.services.free_allowances
    await allowances.set(bob.id, f"{START:%Y-%m}", 5_000_000, access=OWNER)
    for browser in (alice, manager):
        assert "<dt>Free allowance</dt><dd>5.00 EUR a month</dd>" in (await browser.get(page)).text
    assert "Free allowance" not in (await developer.get(page)).text

    await allowances.set(bob.id, "2027-02", 0, access=OWNER)
    assert "<dd>5.00 EUR a month; from February 2027 on 0.00 EUR</dd>" in (await alice.get(page)).text


async def test_a_viewer_can_only_read_terms(console: ConsoleApp) -> None:
    vera, bob = await console.vera(), console.cast.bob.tenant
    assert "Terms" in (await vera.get(f"/tenants/{bob.id}")).text
    for path in ("terms", "model-limits"):
        assert (await vera.get(f"/tenants/{bob.id}/{path}")).status_code == 403
        assert (await vera.post(f"/tenants/{bob.id}/{path}", **TERMS, model="demo")).status_code == 403
