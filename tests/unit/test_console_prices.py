"""The price book in the console: adding and withdrawing prices, and which prices a tenant sees."""

from __future__ import annotations

import html
import re
from datetime import timedelta

import pytest

from appliance.console.prices import group_prices
from appliance.tenancy.principals import TenantChanges
from tests.support.cast import OWNER
from tests.support.clock import START, FakeClock
from tests.support.console_fixtures import ConsoleApp
from tests.support.factories import price

FIELDS = {"model": "demo", "currency": "EUR", "prompt": "0.50", "cached_prompt": "", "completion": "1,50"}


async def test_a_price_is_entered_in_currency_units_and_applies_immediately(console: ConsoleApp, clock: FakeClock) -> None:
    alice = await console.alice()
    answer = await alice.post("/prices", **FIELDS, tier_batch="50", batch_percent="40")
    assert (answer.status_code, answer.headers["location"]) == (303, "/prices")
    added = await console.services.prices.current("demo", clock.now())
    assert added is not None
    assert (added.prompt, added.cached_prompt, added.completion) == (500_000, 500_000, 1_500_000)
    assert (added.batch_percent, added.tier_percents) == (40, {"batch": 50})
    page = (await alice.get("/prices")).text
    for text in ("in force", "0.50", "1.50", "40 %", "batch 50 %"):
        assert text in page


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prompt": ""}, "Fill this in."),
        ({"prompt": "-1"}, "with at most six decimals."),
        ({"cached_prompt": "-1"}, "with at most six decimals, or leave this empty."),
        ({"prompt": "1,500"}, "Write 1500 or 1.500"),
        ({"currency": "euros"}, "urrency"),
        ({"effective_from": "tomorrow"}, "Enter a day like 2027-03-31"),
        ({"batch_percent": "101"}, "Enter a number between 0 and 100."),
        ({"tier_standard": "1000"}, "Enter a number between 0 and 100."),
    ],
)
async def test_an_invalid_field_is_reported_and_no_price_added(
    console: ConsoleApp, clock: FakeClock, change: dict[str, str], sentence: str
) -> None:
    answer = await (await console.alice()).post("/prices", **{**FIELDS, **change})
    assert answer.status_code == 422
    assert sentence in answer.text
    assert await console.services.prices.current("demo", clock.now()) is None


@pytest.mark.parametrize(
    ("field", "is_unfolded"), [("prompt", False), ("batch_percent", True), ("rejected_draft", True), ("tier_standard", True)]
)
async def test_the_discounts_are_unfolded_if_one_of_them_is_refused(console: ConsoleApp, field: str, is_unfolded: bool) -> None:
    answer = await (await console.alice()).post("/prices", **{**FIELDS, field: "-1"})
    assert ('<details class="more" open>' in answer.text) == is_unfolded


async def test_a_price_cannot_start_before_the_current_one(console: ConsoleApp, clock: FakeClock) -> None:
    alice = await console.alice()
    await alice.post("/prices", **FIELDS)
    answer = await alice.post("/prices", **{**FIELDS, "effective_from": "2020-01-01"})
    assert answer.status_code == 422
    assert "past" in answer.text


async def test_a_future_price_can_be_withdrawn_after_confirmation_and_a_current_one_cannot(console: ConsoleApp) -> None:
    alice = await console.alice()
    await alice.post("/prices", **FIELDS)
    await alice.post("/prices", **{**FIELDS, "prompt": "7.77", "effective_from": "2190-01-01"})
    now, later = (await console.services.prices.list()).data
    page = (await alice.get("/prices")).text
    assert f"/prices/{later.id}/withdraw" in page
    assert f"/prices/{now.id}/withdraw" not in page
    assert "7.77" in (await alice.fragment(f"/prices/{later.id}/withdraw")).text
    answer = await alice.post(f"/prices/{later.id}/withdraw")
    assert (answer.status_code, answer.headers["location"]) == (303, "/prices")
    assert "7.77" not in (await alice.get("/prices")).text
    assert (await alice.post(f"/prices/{later.id}/withdraw")).status_code == 404
    refused = await alice.post(f"/prices/{now.id}/withdraw")
    assert (refused.status_code, "stays" in refused.text) == (422, True)


async def test_the_form_is_prefilled_with_the_current_price(console: ConsoleApp) -> None:
    alice = await console.alice()
    await alice.post("/prices", **FIELDS)
    form = (await alice.fragment("/prices/new?model=demo")).text
    assert 'value="0.50"' in form
    assert 'value="1.50"' in form


async def test_each_price_list_links_to_a_form_prefilled_in_its_currency(console: ConsoleApp) -> None:
    alice = await console.alice()
    await alice.post("/prices", **FIELDS)
    await alice.post("/prices", **{**FIELDS, "currency": "CHF", "prompt": "0.77", "completion": "2.88", "tier_batch": "70"})
    links = re.findall(r'class="button quiet small" href="([^"]+)"', html.unescape((await alice.get("/prices")).text))
    francs, euros = [(await alice.fragment(link)).text for link in links]

    for value in ("CHF", "0.77", "2.88", "70"):
        assert f'value="{value}"' in francs
    for value in ("EUR", "0.50", "1.50"):
        assert f'value="{value}"' in euros
    assert '<details class="more" open>' in francs  # current discounts are visible
    assert '<details class="more" open>' not in euros
    await alice.post("/prices", **{**FIELDS, "currency": "GBP", "rejected_draft": "0.05"})
    assert '<details class="more" open>' in (await alice.fragment("/prices/new?model=demo&currency=GBP")).text
    other = (await alice.fragment("/prices/new?model=demo&currency=USD")).text
    assert 'value="USD"' in other
    assert 'value="0.50"' not in other


async def test_a_model_without_a_price_links_to_the_form_for_owners_only(console: ConsoleApp) -> None:
    alice, vera = await console.alice(), await console.vera()
    link = '<a href="/prices/new?model=demo&amp;currency=EUR"'
    for page in ("/prices", f"/tenants/{console.cast.bob.tenant.id}"):
        assert link in (await alice.get(page)).text
        assert link not in (await vera.get(page)).text


@pytest.mark.parametrize(("model", "is_served"), [("demo", True), ("demmo", False)])
async def test_a_price_of_a_model_that_is_not_served_is_added_with_a_remark(
    console: ConsoleApp, model: str, is_served: bool
) -> None:
    alice = await console.alice()
    assert (await alice.post("/prices", **{**FIELDS, "model": model})).headers["location"] == "/prices"
    page = (await alice.get("/prices")).text
    assert ("No model of this name is served" in page) is not is_served
    assert ('<span class="badge">not served</span>' in page) is not is_served
    assert '<option value="demo"></option>' in (await alice.fragment("/prices/new")).text


async def test_a_viewer_can_only_read_prices(console: ConsoleApp) -> None:
    vera = await console.vera()
    assert "No prices." in (await vera.get("/prices")).text
    assert (await vera.post("/prices", **FIELDS)).status_code == 403


def test_prices_are_marked_as_past_in_force_or_future() -> None:
    prices = [price(at=START + timedelta(days=day)) for day in (-10, -1, 5)]
    ((model, currency, book),) = group_prices(prices, START)
    assert (model, currency) == ("demo", "EUR")
    assert [state for _, state in book] == ["future", "in force", "past"]


async def test_a_model_without_a_price_in_the_tenant_s_currency_is_warned_about(console: ConsoleApp) -> None:
    alice = await console.alice()
    sentence = "<b>demo</b> has no price in EUR: its requests cost nothing"
    pages = ("/prices", f"/tenants/{console.cast.bob.tenant.id}")
    assert all([sentence in (await alice.get(page)).text for page in pages])
    await alice.post("/prices", **FIELDS)
    assert not any([sentence in (await alice.get(page)).text for page in pages])


async def test_a_tenant_sees_only_the_prices_that_apply_to_it(console: ConsoleApp, clock: FakeClock) -> None:
    bob, prices, now = console.cast.bob.tenant, console.services.prices, clock.now()
    tiers = {"batch": 80}
    for model, currency, prompt, start in (
        ("demo", "EUR", 3_330_000, now),
        ("demo", "EUR", 2_220_000, now + timedelta(days=9)),
        ("demo", "USD", 4_440_000, now),
        ("other", "EUR", 5_550_000, now),
    ):
        await prices.add(
            model=model,
            currency=currency,
            prompt=prompt,
            cached_prompt=0,
            completion=1,
            tier_percents=tiers,
            effective_from=start,
        )
    await console.services.tenants.update(bob.id, TenantChanges(tier="batch"), access=OWNER)
    viewer = await console.member_of(console.cast.bob, "viewer")

    page = (await viewer.get(f"/tenants/{bob.id}")).text

    shown = page[page.index('id="prices-title"') : page.index('id="terms-title"')]
    for text in ("in force", ">2.664<", "future", ">1.776<"):
        assert text in shown
    for text in ("4.44", "3.552", "other", "5.55", "/prices"):
        assert text not in shown
    assert (await viewer.get(f"/tenants/{console.cast.charlie.tenant.id}")).status_code == 404
    assert (await viewer.get("/prices")).status_code == 403
