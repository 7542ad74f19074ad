"""Invoices, allowances, seller and economics over HTTP: response shapes, files, roles, and errors that name the field."""

from __future__ import annotations

import csv
import io
import re
from datetime import date
from typing import Any

import pytest
from pypdf import PdfReader

from appliance.metering.ledger.epochs import begin_epoch
from tests.support.api_app import ApiApp
from tests.support.billing import Tokens, add_price, post_event
from tests.support.case_ids import case_id
from tests.support.cast import Person, make_person
from tests.support.tenant_isolation import PopulatedTenant, make_populated_tenant, session_headers

INVOICE_FIELDS = {"id", "number", "tenant_id", "month", "state", "lines", "total_micros", "currency"}
LINE_FIELDS = {"model", "kind", "tokens", "requests", "exact_picos", "rounded_micros"}
SELLER = {"name": "Box AG", "address": ["Weg 1"], "tax_basis_points": 1900, "tax_label": "VAT", "payment_terms_days": 14}
HARDWARE = {"cost_micros": 36_000_000_000, "months": 36, "kwh_price_micros": 300_000, "power_w": 1000}


@pytest.fixture
async def bob(api: ApiApp) -> Person:
    """Bob, who used a million prompt tokens on a day of January and has a currency unit of them free."""
    services = api.services
    person = await make_person(services.db, services.clock, "bob")
    price = await add_price(services.db, prompt=3_000_000)
    epoch_id = await begin_epoch(services.db, services.clock, "test")
    tokens = Tokens(prompt=1_000_000, completion=0)
    await post_event(services.db, person, date(2026, 1, 15), tokens, epoch_id=epoch_id, price=price, model="=demo")
    return person


async def drafted(api: ApiApp, person: Person, month: str = "2026-01") -> dict[str, Any]:
    path = f"/tenants/{person.tenant.id}/invoices"
    invoice: dict[str, Any] = await api.call("POST", path, status=201, json={"month": month})
    return invoice


@pytest.mark.parametrize("ending", ["", ".json", ".csv", ".pdf", ".odt"])
async def test_invoices_are_never_cached(api: ApiApp, bob: Person, ending: str) -> None:
    draft = await drafted(api, bob)
    answer = await api.client.get(f"/admin/v1/invoices/{draft['id']}{ending}")
    assert answer.headers.get_list("cache-control") == ["no-store"]


async def test_an_invoice_is_drafted_closed_and_read(api: ApiApp, bob: Person) -> None:
    await api.call("PUT", "/seller", json=SELLER)
    allowance = {"first_month": "2026-01", "monthly_micros": 1_000_000}
    await api.call("POST", f"/tenants/{bob.tenant.id}/allowances", status=201, json=allowance)
    draft = await drafted(api, bob)

    assert set(draft) >= INVOICE_FIELDS
    assert all(set(line) >= LINE_FIELDS for line in draft["lines"])
    assert [line["rounded_micros"] for line in draft["lines"]] == [3_000_000, -1_000_000]
    assert (draft["state"], draft["number"], draft["usage_picos"]) == ("draft", None, 3 * 10**12)
    assert (draft["subtotal_micros"], draft["tax_micros"], draft["total_micros"]) == (2_000_000, 380_000, 2_380_000)
    closed = await api.call("POST", f"/invoices/{draft['id']}/close")
    assert re.fullmatch(r"20\d\d-0001", closed["number"])
    assert (closed["seller"]["name"], closed["buyer"]["name"]) == ("Box AG", "bob")
    await api.call("PUT", "/seller", json={"name": "Another AG"})
    assert await api.call("GET", f"/invoices/{draft['id']}") == closed
    assert await api.call("GET", f"/invoices/{draft['id']}.json") == closed
    assert (await api.call("GET", f"/tenants/{bob.tenant.id}/invoices"))["data"] == [closed]
    (head,) = (await api.call("GET", "/invoices", params={"month": "2026-01", "state": "closed"}))["data"]
    assert (head["id"], head["total_micros"]) == (closed["id"], closed["total_micros"])


async def test_an_invoice_is_closed_only_with_the_expected_total(api: ApiApp, bob: Person) -> None:
    draft = await drafted(api, bob)
    closing = f"/invoices/{draft['id']}/close"
    for total, status, reason in (
        (draft["total_micros"] - 1, 409, ("total_changed", "expected_total_micros")),
        ("3", 400, ("invalid_value", "expected_total_micros")),
    ):
        assert await api.refusal("POST", closing, status, json={"expected_total_micros": total}) == reason
    assert await api.refusal("POST", closing, 400, json={"total_micros": 3}) == ("unknown_parameter", "total_micros")
    expected = {"expected_total_micros": draft["total_micros"]}
    for currency, status, reason in (
        ("CHF", 409, ("total_changed", "expected_currency")),
        ("eur", 400, ("invalid_value", "expected_currency")),
    ):
        assert await api.refusal("POST", closing, status, json={**expected, "expected_currency": currency}) == reason
    closed = await api.call("POST", closing, json={**expected, "expected_currency": draft["currency"]})
    assert closed["total_micros"] == draft["total_micros"]


async def test_a_list_of_drafts_names_no_currency_that_could_have_changed(api: ApiApp) -> None:
    charlie = await make_person(api.services.db, api.services.clock, "charlie")
    draft = await drafted(api, charlie)
    await api.call("PATCH", f"/tenants/{charlie.tenant.id}", json={"currency": "CHF"})
    (head,) = (await api.call("GET", "/invoices"))["data"]
    assert (draft["currency"], head["currency"], head["total_micros"]) == ("EUR", None, None)
    assert (await api.call("GET", f"/invoices/{draft['id']}"))["currency"] == "CHF"
    closed = await api.call("POST", f"/invoices/{draft['id']}/close")
    (head,) = (await api.call("GET", "/invoices"))["data"]
    assert head["currency"] == closed["currency"] == "CHF"


async def test_an_invoice_can_be_downloaded_as_csv_and_pdf(api: ApiApp, bob: Person) -> None:
    draft = await drafted(api, bob)
    answer = await api.client.get(f"/admin/v1/invoices/{draft['id']}.csv")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    page = await api.client.get(f"/admin/v1/invoices/{draft['id']}.pdf")

    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert [(row["kind"], row["exact_picos"], row["rounded_micros"]) for row in rows] == [
        ("prompt", "3000000000000", "3000000")
    ]
    assert rows[0]["model"] == "'=demo"  # escaped, so that spreadsheets see no formula
    assert page.headers["content-type"] == "application/pdf"
    assert page.headers["content-disposition"] == f'inline; filename="draft-2026-01-bob-{bob.tenant.id}.pdf"'
    number = (await api.call("POST", f"/invoices/{draft['id']}/close"))["number"]
    closed = await api.client.get(f"/admin/v1/invoices/{draft['id']}.json")
    assert closed.headers["content-disposition"] == f'inline; filename="invoice-{number}-bob-2026-01.json"'
    assert "DRAFT" in PdfReader(io.BytesIO(page.content)).pages[0].extract_text()
    assert await api.refusal("GET", f"/invoices/{draft['id']}.docx", 404) == ("not_found", "invoice_id")


async def test_a_csv_file_has_empty_cells_where_an_invoice_has_no_number_and_a_line_no_model_or_price(
    api: ApiApp, bob: Person
) -> None:
    allowance = {"first_month": "2026-01", "monthly_micros": 1_000_000}
    await api.call("POST", f"/tenants/{bob.tenant.id}/allowances", status=201, json=allowance)
    path = f"/invoices/{(await drafted(api, bob))['id']}"
    draft = (await api.client.get(f"/admin/v1{path}.csv")).text
    number = (await api.call("POST", f"{path}/close"))["number"]
    closed = (await api.client.get(f"/admin/v1{path}.csv")).text

    heading, *lines = closed.split("\r\n")
    assert heading.startswith("number,tenant_id,month,line_month,model,kind,tokens,requests,unit_price,")
    cells = f"{number},{bob.tenant.id},2026-01,2026-01"
    assert lines == [
        f"{cells},'=demo,prompt,1000000,1,3000000,3000000000000,3000000,EUR,no,",
        f"{cells},,free_allowance,0,0,,-1000000000000,-1000000,EUR,no,",
        "",
    ]
    assert draft == closed.replace(f"{number},", ",")


async def test_the_reason_of_a_correction_is_in_the_json_and_csv_of_its_line(api: ApiApp, bob: Person) -> None:
    (event,) = (await api.call("GET", "/ledger"))["data"]
    for note in ("=HYPERLINK(1)", 'cut off; @by, "our" restart', 'cut off; @by, "our"\nrestart'):
        correction = {"note": note, "completion_tokens": 1}
        await api.call("POST", f"/ledger/{event['id']}/corrections", status=201, json=correction)
    path = f"/invoices/{(await drafted(api, bob))['id']}"
    draft = await api.call("GET", path)
    closed = await api.call("POST", f"{path}/close")

    assert draft["lines"] == closed["lines"] == (await api.call("GET", path))["lines"]
    usage, adjustment = closed["lines"]
    assert (usage["reasons"], usage["reasons_left_out"]) == ([], 0)
    assert adjustment["reasons"] == ["=HYPERLINK(1)", 'cut off; @by, "our" restart']
    rows = list(csv.DictReader(io.StringIO((await api.client.get(f"/admin/v1{path}.csv")).text)))
    assert [row["reasons"] for row in rows] == ["", """'=HYPERLINK(1) | cut off; @by, "our" restart"""]


async def test_the_columns_of_a_csv_file_have_the_names_of_the_json(api: ApiApp, bob: Person) -> None:
    draft = await drafted(api, bob)
    (row,) = csv.DictReader(io.StringIO((await api.client.get(f"/admin/v1/invoices/{draft['id']}.csv")).text))
    assert set(row) - {"line_month"} <= draft.keys() | draft["lines"][0].keys()


async def test_the_events_behind_an_invoice_are_listed(api: ApiApp, bob: Person) -> None:
    draft = await drafted(api, bob)
    (event,) = (await api.call("GET", f"/invoices/{draft['id']}/events"))["data"]
    assert (event["tenant_id"], event["cost_picos"]) == (bob.tenant.id, draft["usage_picos"])
    assert await api.refusal("GET", f"/invoices/{draft['id']}/events?cursor=x", 400) == ("invalid_value", "cursor")


async def test_a_discarded_draft_can_be_drafted_again(api: ApiApp, bob: Person) -> None:
    draft = await drafted(api, bob)
    assert (await api.client.delete(f"/admin/v1/invoices/{draft['id']}")).status_code == 204
    assert await api.refusal("GET", f"/invoices/{draft['id']}", 404) == ("not_found", "invoice_id")
    assert (await drafted(api, bob))["lines"] == draft["lines"]


async def test_impossible_transitions_are_conflicts_with_their_reason(api: ApiApp, bob: Person) -> None:
    draft = await drafted(api, bob)
    later = await drafted(api, bob, "2026-02")
    assert await api.refusal("POST", f"/invoices/{later['id']}/close", 409) == ("month_out_of_order", "month")
    await api.call("POST", f"/invoices/{draft['id']}/close")
    for method, path in (("POST", f"/invoices/{draft['id']}/close"), ("DELETE", f"/invoices/{draft['id']}")):
        assert await api.refusal(method, path, 409) == ("invoice_closed", "invoice_id")
    again = {"month": draft["month"]}
    assert await api.refusal("POST", f"/tenants/{bob.tenant.id}/invoices", 409, json=again) == ("invoice_closed", "month")
    allowances = f"/tenants/{bob.tenant.id}/allowances"
    late = {"first_month": "2026-01", "monthly_micros": 1}
    assert await api.refusal("POST", allowances, 409, json=late) == ("invoice_closed", "first_month")
    this_month = f"{api.services.clock.now():%Y-%m}"
    running = await drafted(api, bob, this_month)
    assert await api.refusal("POST", f"/invoices/{running['id']}/close", 409) == ("month_not_over", "month")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", "/tenants/{bob}/invoices", {"month": "2026-13"}, 400, "month"),
        ("POST", "/tenants/{bob}/invoices", {"month": "9999-12"}, 400, "month"),
        ("POST", "/tenants/{bob}/invoices", {}, 400, "month"),
        ("POST", "/tenants/tn_x/invoices", {"month": "2026-01"}, 404, "tenant_id"),
        ("GET", "/tenants/tn_x/invoices", None, 404, None),
        ("GET", "/invoices/inv_x.pdf", None, 404, "invoice_id"),
        ("POST", "/invoices/inv_x/close", None, 404, "invoice_id"),
        ("GET", "/invoices?month=x", None, 400, "month"),
        ("GET", "/invoices?state=paid", None, 400, "state"),
        ("POST", "/tenants/{bob}/allowances", {"first_month": "2020-13", "monthly_micros": 1}, 400, "first_month"),
        ("POST", "/tenants/{bob}/allowances", {"first_month": "2026-01", "monthly_micros": -1}, 400, "monthly_micros"),
        ("PUT", "/seller", {"name": "x", "colour": "red"}, 400, "colour"),
        ("PUT", "/seller", {"name": "x", "tax_basis_points": -1}, 400, "tax_basis_points"),
        ("GET", "/seller", None, 404, "seller"),
        ("GET", "/economics", None, 404, "hardware"),
        ("PUT", "/economics", {**HARDWARE, "months": 0}, 400, "months"),
        ("PUT", "/economics", {**HARDWARE, "currency": ""}, 400, "currency"),
        ("PUT", "/economics", {**HARDWARE, "hosted": [{"name": "a", "prompt": -1, "completion": 0}]}, 400, "hosted.prompt"),
    ],
    ids=case_id,
)
async def test_an_invalid_field_or_id_is_named(
    api: ApiApp, bob: Person, method: str, path: str, body: Any, status: int, param: str | None
) -> None:
    answer = await api.refusal(method, path.format(bob=bob.tenant.id), status, json=body)
    assert param is None or answer[1] == param


@pytest.mark.parametrize(("role", "status"), [("owner", 200), ("admin", 200), ("billing", 200), ("viewer", 403)])
async def test_roles_with_billing_close_invoices_and_a_viewer_only_reads(
    api: ApiApp, bob: Person, role: str, status: int
) -> None:
    headers = await api.as_role(role)
    draft = await drafted(api, bob)
    writes = [
        ("POST", f"/invoices/{draft['id']}/close", None),
        ("PUT", "/seller", SELLER),
        ("PUT", "/economics", HARDWARE),
    ]
    assert (await api.call("GET", f"/invoices/{draft['id']}.json", headers=headers))["id"] == draft["id"]
    for method, path, body in writes:
        await api.call(method, path, status=status, headers=headers, json=body)


@pytest.mark.parametrize(("role", "reads"), [("manager", 200), ("developer", 403), ("viewer", 403)])
async def test_only_a_manager_reads_invoices_and_only_of_the_own_tenant(api: ApiApp, role: str, reads: int) -> None:
    own, other = await make_populated_tenant(api.services, "bob"), await make_populated_tenant(api.services, "charlie")
    headers = await session_headers(api.services, own.people[role])

    def paths(of: PopulatedTenant) -> list[str]:
        tenant, invoice = f"/tenants/{of.ids['tenant_id']}", f"/invoices/{of.ids['invoice_id']}"
        return [f"{tenant}/invoices", f"{tenant}/allowances", f"{invoice}.pdf", f"{invoice}.csv", f"{invoice}/events"]

    for path in paths(own):
        assert (await api.client.get(f"/admin/v1{path}", headers=headers)).status_code == reads, path
    for path in paths(other):
        assert (await api.client.get(f"/admin/v1{path}", headers=headers)).status_code in (403, 404), path
    listed = await api.client.get("/admin/v1/invoices", headers=headers)
    if reads == 200:
        assert [row["tenant_id"] for row in listed.json()["data"]] == [own.ids["tenant_id"]]
    for method, path in (
        ("POST", f"/invoices/{own.ids['invoice_id']}/close"),
        ("PUT", "/seller"),
        ("GET", "/seller"),
        ("GET", "/economics"),
    ):
        assert (await api.refusal(method, path, 403, headers=headers, json={}))[0] == "role_not_allowed"


async def test_each_figure_of_the_economics_has_its_source(api: ApiApp) -> None:
    hosted = [{"name": "hosted", "prompt": 150_000, "completion": 600_000}]
    entered = await api.call("PUT", "/economics", json={**HARDWARE, "hosted": hosted})
    read = await api.call("GET", "/economics")

    assert read["figures"] == entered["figures"]
    values = {figure["name"]: figure["value"] for figure in read["figures"]}
    assert (values["hardware_month"], values["energy_month"], values["total_month"]) == (10**9, 219 * 10**6, 1_219 * 10**6)
    assert all(figure["source"] for figure in read["figures"])
    assert (read["hardware"]["power_w"], read["hardware"]["currency"]) == (1000, "EUR")
    assert read["break_even"][0]["break_even_tokens_month"] is None  # without usage there is no mix of tokens


async def test_a_sum_beyond_64_bits_is_exact(api: ApiApp, bob: Person) -> None:
    services = api.services
    dear = await add_price(services.db, prompt=10**12)
    epoch_id = await begin_epoch(services.db, services.clock, "test")
    for _ in range(3):
        tokens = Tokens(prompt=9_000_000, completion=0)
        await post_event(services.db, bob, date(2026, 3, 1), tokens, epoch_id=epoch_id, price=dear)
    draft = await drafted(api, bob, "2026-03")
    assert draft["lines"][0]["exact_picos"] == draft["usage_picos"] == 27 * 10**18
