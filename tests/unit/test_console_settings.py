"""Settings in the console: admission waits of tiers, limits of models, the invoice issuer, and server costs."""

from __future__ import annotations

import re

import pytest

from appliance.console.formatting import units
from appliance.metering.economics import HostedPrice
from appliance.metering.invoicing.seller import read_seller
from appliance.tenancy.principals import Limits
from tests.support.clock import FakeClock
from tests.support.console_fixtures import ConsoleApp
from tests.support.factories import pending, posted

WAITS = {"wait_interactive": "0", "wait_standard": "2,500", "wait_batch": "60000"}
SELLER = {"name": "Alice & Co", "address": "1 Long Lane\r\nBristol", "tax_basis_points": "19,5", "tax_label": "VAT"}
COSTS = {"cost_micros": "36000", "months": "36", "kwh_price_micros": "0.30", "power_w": "1000", "other_monthly_micros": "81"}
HOSTED = "Hosted large; 2; 6; 0.5\nHosted small; 0,10; 0,30"


async def test_admission_waits_of_tiers_are_saved_and_shown(console: ConsoleApp) -> None:
    alice = await console.alice()
    assert (await alice.post("/settings/tiers", **WAITS)).headers["location"] == "/settings"
    assert [tier.admission_wait_ms for tier in await console.services.tiers.list()] == [0, 2500, 60000]
    assert 'value="2500"' in (await alice.get("/settings")).text


@pytest.mark.parametrize(
    ("invalid", "sentence"), [("", "Fill this in."), ("60001", "Enter a number between 0 and 60,000."), ("-1", "whole number")]
)
async def test_an_invalid_wait_changes_no_tier_and_the_form_keeps_its_input(
    console: ConsoleApp, invalid: str, sentence: str
) -> None:
    alice, before = await console.alice(), await console.services.tiers.list()
    answer = await alice.post("/settings/tiers", **{**WAITS, "wait_batch": invalid})
    assert answer.status_code == 422
    assert sentence in answer.text
    assert 'value="2,500"' in answer.text
    assert await console.services.tiers.list() == before


async def test_limits_of_a_model_are_saved_and_removed_when_all_are_empty(console: ConsoleApp) -> None:
    alice = await console.alice()
    fields = {"model": "demo/large", "limit_mode": "shadow", "tokens_per_minute": "5,000"}
    assert (await alice.post("/settings/models", **fields)).headers["location"] == "/settings"
    policy = await console.services.model_policies.find("demo/large")
    assert policy is not None
    assert (policy.limits, policy.limit_mode) == (Limits(tokens_per_minute=5000), "shadow")
    page = (await alice.get("/settings")).text
    assert '<option value="demo"></option>' in (await alice.fragment("/settings/models")).text
    for text in ("demo/large", "/settings/models?model=demo/large", ">shadow<"):
        assert text in page
    assert 'value="5000"' in (await alice.fragment("/settings/models?model=demo/large")).text
    for _ in range(2):
        emptied = await alice.post("/settings/models", model="demo/large", limit_mode="enforce")
        assert emptied.status_code == 303
    assert await console.services.model_policies.find("demo/large") is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": ""}, "Fill this in."),
        ({"limit_mode": "maybe"}, "Choose one of"),
        ({"tokens_per_minute": "-5"}, "Enter a whole number"),
        ({"requests_per_minute": "99999999999999999999"}, "Enter a number between 0 and"),
    ],
)
async def test_invalid_limits_of_a_model_are_reported(console: ConsoleApp, change: dict[str, str], sentence: str) -> None:
    alice = await console.alice()
    answer = await alice.post("/settings/models", **{"model": "demo", "limit_mode": "enforce", "tokens_per_day": "7", **change})
    assert answer.status_code == 422
    assert sentence in answer.text
    assert await console.services.model_policies.list() == []


async def test_the_invoice_issuer_is_saved_and_shown(console: ConsoleApp) -> None:
    alice = await console.alice()
    assert "no issuer" in (await alice.get("/settings")).text
    assert (await alice.post("/settings/seller", **SELLER, phone="0117 496")).headers["location"] == "/settings"
    seller = await read_seller(console.services.appliance_records)
    assert seller is not None
    assert (seller.name, seller.address, seller.tax_basis_points) == ("Alice & Co", ("1 Long Lane", "Bristol"), 1950)
    page = (await alice.get("/settings")).text
    for text in ("Alice &amp; Co", "1 Long Lane, Bristol", "19.5 % VAT", "Telephone", "0117 496", "Payment terms (days)"):
        assert text in page
    assert "1 Long Lane\nBristol</textarea>" in (await alice.fragment("/settings/seller")).text


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"name": ""}, "Fill this in."),
        ({"tax_basis_points": "19.555"}, "at most two decimals"),
        ({"tax_basis_points": "101"}, "from 0 to 100"),
        ({"payment_terms_days": "366"}, "Enter a number between 0 and 365."),
        ({"address": "\n".join("123456789")}, "at most 8 lines"),
        ({"bank": "\n".join("123456789")}, "at most 8 lines"),
        ({"tax_id": "x" * 201}, "1 to 200 characters"),
    ],
)
async def test_an_invalid_invoice_issuer_is_refused_and_the_form_keeps_its_input(
    console: ConsoleApp, change: dict[str, str], sentence: str
) -> None:
    alice = await console.alice()
    answer = await alice.post("/settings/seller", **{**SELLER, "phone": "0117 496", **change})
    assert answer.status_code == 422
    assert sentence in answer.text
    assert 'value="0117 496"' in answer.text
    assert re.findall(r'name="(\w+)"[^>]* aria-invalid="true"', answer.text) == [*change]
    assert await read_seller(console.services.appliance_records) is None


async def test_server_costs_give_the_cost_per_million_tokens_and_the_break_even(console: ConsoleApp, clock: FakeClock) -> None:
    entry = pending(console.cast.bob, admitted_at=clock.now())
    await console.services.ledger.open(entry)
    await console.services.ledger.settle(posted(entry.request_id, prompt=600_000, completion=400_000))
    clock.advance(3600)
    alice = await console.alice()
    assert "No server costs entered" in (await alice.get("/settings")).text
    assert (await alice.post("/settings/economics", **COSTS, hosted=HOSTED)).headers["location"] == "/settings"
    hardware = await console.services.economics.hardware()
    assert hardware is not None
    assert hardware.hosted == (
        HostedPrice(name="Hosted large", prompt=2_000_000, completion=6_000_000, cached_prompt=500_000),
        HostedPrice(name="Hosted small", prompt=100_000, completion=300_000),
    )
    page = (await alice.get("/settings")).text
    for text in ("1,300.00 EUR", "Hosted large", "3.60 EUR", "entered by the operator", "total month"):
        assert text in page, text
    assert "Hosted small; 0.10; 0.30</textarea>" in (await alice.fragment("/settings/economics")).text


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"cost_micros": ""}, "Fill this in."),
        ({"months": "0"}, "Enter a number between 1 and 240."),
        ({"currency": "euros"}, "urrency"),
        ({"power_w": "much"}, "Enter a whole number"),
        ({"hosted": "Hosted large; 2; 6\nnonsense"}, "Line 2: enter a name and two or three prices"),
        ({"hosted": "; 2; 6"}, "Line 1: name must have 1 to 200 characters"),
        ({"hosted": "large; -2; 6"}, "Line 1: enter a name"),
    ],
)
async def test_invalid_server_costs_are_refused_and_the_form_keeps_its_input(
    console: ConsoleApp, change: dict[str, str], sentence: str
) -> None:
    alice = await console.alice()
    answer = await alice.post("/settings/economics", **{**COSTS, "hosted": HOSTED, **change})
    assert answer.status_code == 422
    assert sentence in answer.text
    assert 'value="0.30"' in answer.text
    assert await console.services.economics.hardware() is None


async def test_a_viewer_changes_no_settings_and_billing_only_issuer_and_costs(console: ConsoleApp) -> None:
    vera = await console.vera()
    page = await vera.get("/settings")
    assert page.status_code == 200
    assert ">Save<" not in page.text
    changes = {"/settings/tiers": WAITS, "/settings/models": {"model": "demo"}}
    money = {"/settings/seller": SELLER, "/settings/economics": COSTS}
    for path, fields in (changes | money).items():
        assert (await vera.post(path, **fields)).status_code == 403
    member = await console.services.members.get_by_email("vera@example.com")
    await console.services.members.change(member.id, role="billing")
    for path, fields in (changes | money).items():
        assert (await vera.post(path, **fields)).status_code == (303 if path in money else 403)


def test_negative_amounts_keep_their_digits() -> None:
    assert [units(micros) for micros in (-1_500_000, -1, 0)] == ["-1.50", "-0.000001", "0.00"]
