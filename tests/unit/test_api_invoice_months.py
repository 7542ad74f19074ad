"""Drafting and closing a month for all tenants in one call: the result of each, repetition, permissions, and refusals."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from appliance.api.admin import invoices as routes
from appliance.metering.invoicing import invoices as service
from appliance.metering.invoicing import months
from appliance.metering.ledger.epochs import begin_epoch
from tests.support.api_app import ApiApp
from tests.support.billing import Tokens, add_price, post_event
from tests.support.cast import Person, make_person
from tests.support.tampering import tamper

DRAFT, CLOSE = "/invoices/months/2026-02/draft", "/invoices/months/2026-02/close"


@pytest.fixture
async def people(api: ApiApp) -> dict[str, Person]:
    """Five tenants, for the month of February 2026.

    `ann` and `eve` have usage, `bob` has some in January too, `charlie` has none, and the events of `dora` contradict
    themselves.
    """
    services = api.services
    names = ("ann", "bob", "charlie", "dora", "eve")
    people = {name: await make_person(services.db, services.clock, name) for name in names}
    price, epoch_id = await add_price(services.db, prompt=1_000_000), await begin_epoch(services.db, services.clock, "test")
    for name, day in (("bob", date(2026, 1, 3)), *((name, date(2026, 2, 3)) for name in ("ann", "bob", "dora", "eve"))):
        tokens = Tokens(prompt=1_000_000, completion=0)
        await post_event(services.db, people[name], day, tokens, epoch_id=epoch_id, price=price)
    broken = people["dora"].tenant.id
    await tamper(services.db, f"UPDATE usage_events SET cost_picos = cost_picos + 1 WHERE tenant_id = '{broken}'")
    return people


@pytest.fixture(params=[1, 2, 20])
def portion(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (service, months):
        monkeypatch.setattr(module, "PORTION_TENANTS", request.param)


def results(answer: Any, people: dict[str, Person]) -> list[tuple[str, str, str | None]]:
    """Return (name, result, code of the error) of each of these tenants, in the order of the answer."""
    names = {person.tenant.id: name for name, person in people.items()}
    rows = [row for row in answer["data"] if row["tenant_id"] in names]
    return [(names[row["tenant_id"]], row["result"], row["error"] and row["error"]["code"]) for row in rows]


@pytest.mark.usefixtures("portion")
async def test_a_month_is_closed_for_all_tenants_with_a_result_for_each(api: ApiApp, people: dict[str, Person]) -> None:
    answer = await api.call("POST", CLOSE)

    assert results(answer, people) == [
        ("ann", "closed", None),
        ("bob", "failed", "earlier_month_open"),
        ("charlie", "skipped", "nothing_to_bill"),
        ("dora", "failed", "invoice_inconsistent"),
        ("eve", "closed", None),
    ]
    assert (answer["num_done"], answer["num_failed"]) == (2, 2)
    assert answer["num_done"] + answer["num_failed"] + answer["num_skipped"] == len(answer["data"])
    closed = [row["invoice"] for row in answer["data"] if row["result"] == "closed"]
    assert [invoice["number"][-5:] for invoice in closed] == ["-0001", "-0002"]
    assert closed[0] == await api.call("GET", f"/invoices/{closed[0]['id']}")
    assert (await api.call("GET", "/invoices", params={"state": "draft"}))["data"] == []


async def test_a_month_is_drafted_only_for_tenants_with_something_to_bill(api: ApiApp, people: dict[str, Person]) -> None:
    answer = await api.call("POST", DRAFT)

    assert results(answer, people) == [
        ("ann", "drafted", None),
        ("bob", "drafted", None),
        ("charlie", "skipped", "nothing_to_bill"),
        ("dora", "failed", "invoice_inconsistent"),
        ("eve", "drafted", None),
    ]
    drafts = [row["invoice"] for row in answer["data"] if row["result"] == "drafted"]
    assert [invoice["total_micros"] for invoice in drafts] == [1_000_000] * 3
    assert len((await api.call("GET", "/invoices", params={"state": "draft"}))["data"]) == 3


async def test_drafting_a_month_again_returns_the_same_drafts(api: ApiApp, people: dict[str, Person]) -> None:
    first = await api.call("POST", DRAFT)
    assert await api.call("POST", DRAFT) == first


async def test_closing_a_month_again_closes_what_is_left(api: ApiApp, people: dict[str, Person]) -> None:
    await api.call("POST", CLOSE)
    await api.call("POST", "/invoices/months/2026-01/close")
    again = await api.call("POST", CLOSE)

    assert [row for row in results(again, people) if row[1] != "failed"] == [
        ("ann", "skipped", "invoice_closed"),
        ("bob", "closed", None),
        ("charlie", "skipped", "nothing_to_bill"),
        ("eve", "skipped", "invoice_closed"),
    ]


async def test_a_tenant_with_a_later_closed_month_is_skipped(api: ApiApp, people: dict[str, Person]) -> None:
    await api.call("POST", CLOSE, json={"tenant_ids": [people["ann"].tenant.id]})
    answer = await api.call("POST", "/invoices/months/2026-01/close", json={"tenant_ids": [people["ann"].tenant.id]})
    assert results(answer, people) == [("ann", "skipped", "month_out_of_order")]


async def test_only_the_given_tenants_are_billed_once_and_numbered_in_their_order(
    api: ApiApp, people: dict[str, Person]
) -> None:
    ids = [people[name].tenant.id for name in ("eve", "ann", "eve")]
    answer = await api.call("POST", CLOSE, json={"tenant_ids": [*ids, "tn_x"]})

    assert [(row["tenant_id"], row["result"]) for row in answer["data"]] == [
        (ids[0], "closed"), (ids[1], "closed"), ("tn_x", "failed"),
    ]  # fmt: skip
    assert [row["invoice"]["number"][-5:] for row in answer["data"][:2]] == ["-0001", "-0002"]
    assert answer["data"][2]["error"] == {
        "message": "no such tenant", "type": "invalid_request_error", "param": "tenant_id", "code": "not_found",
    }  # fmt: skip


@pytest.mark.parametrize("verb", ["draft", "close"])
async def test_an_archived_tenant_is_billed_too(api: ApiApp, people: dict[str, Person], verb: str) -> None:
    await api.client.delete(f"/admin/v1/tenants/{people['ann'].tenant.id}")
    answer = await api.call("POST", f"/invoices/months/2026-02/{verb}")
    assert results(answer, people)[0] == ("ann", {"draft": "drafted", "close": "closed"}[verb], None)


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("2026-13/draft", None, 400, ("invalid_value", "month")),
        ("2999-01/draft", None, 400, ("invalid_value", "month")),
        ("1999-12/close", None, 400, ("invalid_value", "month")),
        ("{now}/close", None, 409, ("month_not_over", "month")),
        ("2026-02/close", {"tenant_ids": [""]}, 400, ("invalid_value", "tenant_ids")),
        ("2026-02/close", {"tenant_ids": [f"tn_{number}" for number in range(201)]}, 400, ("invalid_value", "tenant_ids")),
        ("2026-02/draft", {"tenant_ids": "tn_x"}, 400, ("invalid_value", "tenant_ids")),
        ("2026-02/draft", {"month": "2026-02"}, 400, ("unknown_parameter", "month")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_refused_month_names_the_field_and_drafts_nothing(
    api: ApiApp, people: dict[str, Person], path: str, body: Any, status: int, reason: tuple[str, str]
) -> None:
    path = f"/invoices/months/{path.format(now=f'{api.services.clock.now():%Y-%m}')}"
    assert await api.refusal("POST", path, status, json=body) == reason
    assert (await api.call("GET", "/invoices"))["data"] == []


@pytest.mark.parametrize("path", [DRAFT, CLOSE])
async def test_more_tenants_than_one_call_bills_must_be_given(
    api: ApiApp, people: dict[str, Person], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    num_tenants = len((await api.call("GET", "/tenants"))["data"])
    await api.client.delete(f"/admin/v1/tenants/{people['ann'].tenant.id}")
    monkeypatch.setattr(routes, "LIST_ITEMS_MAX", num_tenants - 1)
    assert await api.refusal("POST", path, 400) == ("invalid_value", "tenant_ids")
    assert (await api.call("GET", "/invoices"))["data"] == []

    monkeypatch.setattr(routes, "LIST_ITEMS_MAX", num_tenants)
    assert len((await api.call("POST", path))["data"]) == num_tenants


async def test_an_invalid_month_is_refused_without_tenants_too(api: ApiApp) -> None:
    for tenant in (await api.call("GET", "/tenants"))["data"]:
        await tamper(api.services.db, f"DELETE FROM tenants WHERE id = '{tenant['id']}'")
    assert await api.refusal("POST", "/invoices/months/2026-13/draft", 400) == ("invalid_value", "month")


@pytest.mark.parametrize(("role", "status"), [("owner", 200), ("admin", 200), ("billing", 200), ("viewer", 403)])
@pytest.mark.parametrize("path", [DRAFT, CLOSE])
async def test_only_roles_with_billing_bill_a_month(api: ApiApp, role: str, status: int, path: str) -> None:
    await api.call("POST", path, status=status, headers=await api.as_role(role))


async def test_an_invoice_closed_by_someone_else_meanwhile_is_skipped_and_keeps_its_number(
    api: ApiApp, people: dict[str, Person], monkeypatch: pytest.MonkeyPatch
) -> None:
    invoices, ann = api.services.invoices, people["ann"].tenant.id
    close_each = invoices.close_each

    async def close_twice(expected: Any, *, access: Any) -> Any:
        await close_each(expected, access=access)
        return await close_each(expected, access=access)

    monkeypatch.setattr(invoices, "close_each", close_twice)
    answer = await api.call("POST", CLOSE, json={"tenant_ids": [ann]})

    assert results(answer, people) == [("ann", "skipped", "invoice_closed")]
