"""Prices, corrections and usage in the administrators' API: correct results, and errors that name the field."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from appliance.base.clock import rfc3339
from appliance.metering.ledger.epochs import begin_epoch
from appliance.tenancy.keys import Keys
from appliance.tenancy.tenants import Tenants
from tests.support import factories
from tests.support.api_app import ApiApp
from tests.support.case_ids import case_id
from tests.support.cast import OWNER, PEPPER, Person
from tests.support.ledgers import utc_ledger

PRICE: dict[str, Any] = {"model": "demo", "prompt": 1000, "completion": 3000}


@pytest.fixture
async def event(api: ApiApp) -> dict[str, Any]:
    """A posted event of Bob's: 10 prompt and 5 output tokens at the price."""
    services = api.services
    tenant = await Tenants(services.db, services.clock).create(name="bob", access=OWNER)
    key, secret = await Keys(services.db, services.clock, PEPPER).create(tenant.id, name="bob's key", access=OWNER)
    bob = Person(tenant=tenant, key=key, secret=secret)
    await api.call("POST", "/prices", status=201, json=PRICE)
    now = services.clock.now()
    entry = factories.pending(bob, price=await services.prices.current("demo", now), admitted_at=now)
    ledger = utc_ledger(services.db, services.clock, await begin_epoch(services.db, services.clock, "test"))
    await ledger.start()
    await ledger.open(entry)
    await ledger.settle(factories.posted(entry.request_id))
    await ledger.stop()
    posted: dict[str, Any] = (await api.call("GET", "/ledger"))["data"][0]
    return posted


async def test_a_price_is_returned_with_all_its_terms(api: ApiApp) -> None:
    terms = {
        **PRICE,
        "cached_prompt": 10,
        "rejected_draft": 5,
        "currency": "CHF",
        "batch_percent": 50,
        "tier_percents": {"batch": 80},
    }
    price = await api.call("POST", "/prices", status=201, json=terms)
    assert {name: price[name] for name in terms} == terms
    assert (await api.call("GET", "/prices"))["data"] == [price]


async def test_a_price_can_begin_in_the_future_but_not_twice_or_in_the_past(api: ApiApp) -> None:
    await api.call("POST", "/prices", status=201, json=PRICE)
    now = api.services.clock.now()
    later = {**PRICE, "effective_from": rfc3339(now + timedelta(days=30))}
    first = await api.call("POST", "/prices", status=201, json=later)
    assert await api.refusal("POST", "/prices", 400, json={**later, "prompt": 1}) == ("invalid_value", "effective_from")
    error = (await api.call("POST", "/prices", status=400, json=later))["error"]
    assert first["id"] in error["message"]
    past = {**PRICE, "effective_from": rfc3339(now - timedelta(days=1))}
    assert await api.refusal("POST", "/prices", 400, json=past) == ("invalid_value", "effective_from")


@pytest.mark.parametrize(
    ("field", "value"),
    [("prompt", -1), ("rejected_draft", 10**13), ("batch_percent", 101), ("currency", "euro"), ("tier_percents", {"gold": 1})],
    ids=case_id,
)
async def test_an_invalid_field_of_a_price_is_named(api: ApiApp, field: str, value: Any) -> None:
    assert await api.refusal("POST", "/prices", 400, json={**PRICE, field: value}) == ("invalid_value", field)


async def test_an_event_has_its_day_posting_and_rate(event: dict[str, Any]) -> None:
    assert (event["posting"], event["price_basis_points"], event["rejected_tokens"]) == (1, 10_000, 0)
    assert (event["cause"], event["corrects_id"], event["note"]) == (None, None, None)
    assert event["billing_day"] == event["admitted_at"][:10]


async def test_a_correction_is_a_separate_event_included_in_sums(api: ApiApp, event: dict[str, Any]) -> None:
    path = f"/ledger/{event['id']}/corrections"
    made = await api.call("POST", path, status=201, json={"note": "cut off by us", "completion_tokens": -2})
    assert (made["kind"], made["corrects_id"], made["completion_tokens"], made["cost_picos"]) == (
        "adjustment",
        event["id"],
        -2,
        -6000,
    )
    assert (await api.call("GET", "/ledger"))["data"] == [event, made]
    assert (await api.call("GET", "/ledger", params={"kind": "adjustment"}))["data"] == [made]
    (row,) = (await api.call("GET", "/usage", params={"group_by": "model"}))["data"]
    assert (row["requests"], row["completion_tokens"], row["cost_picos"]) == (1, 3, event["cost_picos"] - 6000)
    entries = (await api.services.audit.page(access=OWNER)).data
    assert [entry.action for entry in entries if entry.target_id == made["id"]] == ["ledger.correct"]


async def test_an_invalid_field_of_a_correction_is_named(api: ApiApp, event: dict[str, Any]) -> None:
    path = f"/ledger/{event['id']}/corrections"
    assert await api.refusal("POST", path, 400, json={"note": "x", "completion_tokens": -6}) == (
        "invalid_value",
        "completion_tokens",
    )
    assert await api.refusal("POST", path, 400, json={"completion_tokens": -1}) == ("invalid_value", "note")
    huge = {"note": "x", "completion_tokens": 20_000_000}
    assert await api.refusal("POST", path, 400, json=huge) == ("invalid_value", "confirm")
    await api.call("POST", path, status=201, json={**huge, "confirm": True})
    assert await api.refusal("POST", path, 400, json={"note": "x", "tokens": 1}) == ("unknown_parameter", "tokens")
    for missing in ("999", "x", "1" * 30):
        body = {"note": "x", "completion_tokens": -1}
        assert (await api.refusal("POST", f"/ledger/{missing}/corrections", 404, json=body))[0] == "not_found"


async def test_a_correction_sent_again_with_its_key_gets_the_same_response_and_another_one_a_conflict(
    api: ApiApp, event: dict[str, Any]
) -> None:
    path, headers = f"/ledger/{event['id']}/corrections", {"Idempotency-Key": "refund 4711"}
    body = {"note": "cut off by us", "completion_tokens": -2}
    made = await api.call("POST", path, status=201, json=body, headers=headers)

    assert await api.call("POST", path, status=201, json=body, headers=headers) == made
    other = {**body, "completion_tokens": -1}
    refused = await api.client.post(f"/admin/v1{path}", json=other, headers=headers)
    error = refused.json()["error"]
    assert (refused.status_code, error["type"], error["code"]) == (409, "conflict", "idempotency_conflict")
    assert (error["param"], refused.headers["x-should-retry"]) == ("Idempotency-Key", "false")
    assert (await api.call("GET", "/ledger"))["data"] == [event, made]
    assert await api.refusal("POST", path, 400, json=body, headers={"Idempotency-Key": ""}) == (
        "invalid_value",
        "Idempotency-Key",
    )


async def test_only_roles_with_billing_can_correct(api: ApiApp, event: dict[str, Any]) -> None:
    path, body = f"/ledger/{event['id']}/corrections", {"note": "x", "completion_tokens": -1}
    await api.call("POST", path, status=403, json=body, headers=await api.as_role("viewer"))
    await api.call("POST", path, status=201, json=body, headers=await api.as_role("billing"))


async def test_usage_can_be_filtered_by_key_and_model(api: ApiApp, event: dict[str, Any]) -> None:
    for params, rows in (
        ({"model": "demo"}, 1),
        ({"model": "other"}, 0),
        ({"key_id": event["key_id"]}, 1),
        ({"key_id": "k"}, 0),
    ):
        assert len((await api.call("GET", "/usage", params=params))["data"]) == rows
