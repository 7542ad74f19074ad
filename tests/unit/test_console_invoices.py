"""Invoices in the console: drafting, reading, closing once, and discarding."""

from __future__ import annotations

import re
from datetime import timedelta

from appliance.base.ids import new_id
from appliance.metering.invoicing.free_allowances import FreeAllowances
from appliance.metering.invoicing.seller import Seller
from appliance.metering.ledger.corrections import Correction
from appliance.metering.usage import LedgerFilter
from appliance.tenancy.audit import AuditFilter
from tests.support.cast import OWNER
from tests.support.clock import START, FakeClock
from tests.support.console_fixtures import ConsoleApp
from tests.support.console_invoices import MONTH, bill_usage, close, draft, end_month
from tests.support.factories import pending, posted

MONTH_NAME = f"{START:%B %Y}"


async def test_a_draft_shows_the_month_s_costs_so_far(console: ConsoleApp) -> None:
    await bill_usage(console, console.cast.bob)
    alice = await console.alice()
    page = (await alice.get(await draft(console, alice, console.cast.bob))).text
    assert all(text in page for text in (f"{MONTH_NAME} of bob", "draft", "0.001200 EUR", "0.001230 EUR"))
    names = re.findall(r'<th scope="row" class="wraps">([^<]+)<', page)
    assert names == ["Prompt tokens", "Cached prompt tokens", "Output tokens"]
    assert "/admin/v1/invoices/" in page
    assert MONTH_NAME in (await alice.get("/invoices")).text


async def test_empty_lists_and_an_empty_invoice_have_a_placeholder(console: ConsoleApp) -> None:
    alice = await console.alice()
    assert "No invoices." in (await alice.get("/invoices")).text
    assert "Nothing due." in (await alice.get(await draft(console, alice, console.cast.charlie))).text
    assert "No matching invoices." in (await alice.get("/invoices?state=closed")).text


async def test_closing_before_the_end_of_the_month_is_refused_with_the_reason(console: ConsoleApp) -> None:
    await bill_usage(console, console.cast.bob)
    alice = await console.alice()
    address = await draft(console, alice, console.cast.bob)
    answer = await close(alice, address)
    assert answer.status_code == 422
    assert "not over" in answer.text


async def test_closing_is_offered_after_the_month_and_its_date_is_shown_before(console: ConsoleApp, clock: FakeClock) -> None:
    await bill_usage(console, console.cast.bob)
    alice = await console.alice()
    address = await draft(console, alice, console.cast.bob)
    page = (await alice.get(address)).text
    assert f'href="{address}/close"' not in page
    assert f"It can be closed from 1 {START + timedelta(days=31):%B %Y} on" in page
    end_month(clock)
    assert f'href="{address}/close"' in (await (await console.alice()).get(address)).text


async def test_without_an_invoice_issuer_drafts_and_closing_show_a_warning(console: ConsoleApp, clock: FakeClock) -> None:
    await bill_usage(console, console.cast.bob)
    end_month(clock)
    alice = await console.alice()
    address = await draft(console, alice, console.cast.bob)
    warning = "No invoice issuer is entered"

    for path in (address, f"{address}/close"):
        page = (await alice.get(path)).text
        assert warning in page
        assert 'href="/settings/seller"' in page
    await console.services.appliance_records.put("seller", Seller(name="Seller AG").to_record())
    for path in (address, f"{address}/close"):
        assert warning not in (await alice.get(path)).text
    await console.services.invoices.close(address.rpartition("/")[2], access=OWNER)
    assert warning not in (await alice.get(address)).text


async def test_the_missing_issuer_warning_is_hidden_from_tenants(console: ConsoleApp) -> None:
    await bill_usage(console, console.cast.bob)
    address = await draft(console, await console.alice(), console.cast.bob)
    page = await (await console.member_of(console.cast.bob, "manager")).get(address)
    assert page.status_code == 200
    assert "issuer" not in page.text


async def test_a_closed_invoice_has_a_number_and_cannot_be_closed_again(console: ConsoleApp, clock: FakeClock) -> None:
    await bill_usage(console, console.cast.bob)
    end_month(clock)
    alice = await console.alice()
    address = await draft(console, alice, console.cast.bob)
    assert "gets the next number" in (await alice.fragment(f"{address}/close")).text
    assert (await close(alice, address)).headers["location"] == address
    page = (await alice.get(address)).text
    assert "closed" in page
    assert "-0001" in page
    assert f'href="{address}/close"' not in page
    assert (await close(alice, address)).status_code == 422


async def test_the_list_shows_the_date_of_a_closed_invoice(console: ConsoleApp, clock: FakeClock) -> None:
    await bill_usage(console, console.cast.bob)
    end_month(clock)
    alice = await console.alice()
    await close(alice, await draft(console, alice, console.cast.bob))
    page = (await alice.get("/invoices")).text

    (row,) = [row for row in page.split("<tr>") if "-0001" in row]
    assert f">{clock.now().date()}</time>" in row
    assert "ago" not in row


async def test_a_total_that_changed_after_it_was_shown_is_not_closed_but_shown_again(
    console: ConsoleApp, clock: FakeClock
) -> None:
    await bill_usage(console, console.cast.bob, completion=1_000_000)
    end_month(clock)
    alice = await console.alice()
    address = await draft(console, alice, console.cast.bob)
    assert 'name="total_micros" value="12000030"' in (await alice.fragment(f"{address}/close")).text
    event = (await console.services.reports.ledger_page(1, access=OWNER)).data[0]
    await console.services.corrections.add(event.id, Correction(note="a refund", completion_tokens=-1))

    for shown, currency in (
        ("12000030", "EUR"), ("", "EUR"), ("x", "EUR"), ("1" * 30, "EUR"), ("12000018", ""), ("12000018", "CHF"),
    ):  # fmt: skip
        answer = await alice.post(f"{address}/close", total_micros=shown, currency=currency)
        assert (answer.status_code, 'name="total_micros" value="12000018"' in answer.text) == (422, True)
        assert ("is 12.000018 EUR, not 12.000030 EUR: check the draft again." in answer.text) == (shown == "12000030")
    assert f'href="{address}/close"' in (await alice.get(address)).text
    assert (await alice.post(f"{address}/close", total_micros="12000018", currency="EUR")).headers["location"] == address


async def test_a_draft_is_discarded_after_confirmation_and_can_be_drafted_again(console: ConsoleApp) -> None:
    await bill_usage(console, console.cast.bob)
    alice = await console.alice()
    address = await draft(console, alice, console.cast.bob)
    assert f'href="{address}/discard"' in (await alice.get(address)).text

    for confirmation in (await alice.get(f"{address}/discard"), await alice.fragment(f"{address}/discard")):
        assert confirmation.status_code == 200
        assert f"Discard {MONTH_NAME} of bob" in confirmation.text
        assert f'method="post" action="{address}/discard"' in confirmation.text
    assert (await alice.get(address)).status_code == 200  # nothing is discarded before the confirmation

    answer = await alice.post(f"{address}/discard")
    assert (answer.status_code, answer.headers["location"]) == (303, "/invoices")
    listed = (await alice.get("/invoices")).text
    assert "Draft discarded." in listed
    assert "No invoices." in listed
    (entry,) = (await console.services.audit.page(filters=AuditFilter(actions=["invoice.discard"]), access=OWNER)).data
    assert (entry.actor_name, entry.tenant_id, entry.before) == (
        "alice@example.com",
        console.cast.bob.tenant.id,
        f'{{"month":"{MONTH}"}}',
    )
    assert "0.001230 EUR" in (await alice.get(await draft(console, alice, console.cast.bob))).text


async def test_discarding_a_closed_invoice_is_refused_with_the_reason(console: ConsoleApp, clock: FakeClock) -> None:
    end_month(clock)
    alice = await console.alice()
    address = await draft(console, alice, console.cast.bob)
    await close(alice, address)
    assert f'href="{address}/discard"' not in (await alice.get(address)).text

    confirmation = await alice.get(f"{address}/discard")
    assert confirmation.status_code == 409
    toast = await alice.fragment(f"{address}/discard")
    assert "never changes" in toast.headers["hx-trigger"]
    refused = await alice.post(f"{address}/discard")
    assert refused.status_code == 422
    for answer in (confirmation, refused):
        assert f"The invoice of {MONTH} is closed as" in answer.text
    assert (await alice.get(address)).status_code == 200


async def test_a_draft_that_cannot_be_computed_can_be_discarded(console: ConsoleApp) -> None:
    alice = await console.alice()
    address = await draft(console, alice, console.cast.bob)
    for currency in ("EUR", "USD"):
        price = await console.services.prices.add(
            model="demo", currency=currency, prompt=1_000_000, cached_prompt=0, completion=0, effective_from=START
        )
        entry = pending(console.cast.bob, request_id=new_id("req"), price=price)
        await console.services.ledger.open(entry)
        await console.services.ledger.settle(posted(entry.request_id, prompt=50, completion=0))
    page = await alice.get(address)
    assert (page.status_code, "EUR and USD" in page.text) == (200, True)
    assert f'href="{address}/discard"' in page.text
    assert "/discard" not in (await (await console.vera()).get(address)).text
    assert (await alice.get(f"{address}/discard")).status_code == 200
    assert (await alice.post(f"{address}/discard")).status_code == 303


async def test_discarding_an_already_discarded_draft_is_not_found(console: ConsoleApp) -> None:
    alice = await console.alice()
    address = await draft(console, alice, console.cast.bob)
    await console.services.invoices.discard(address.rpartition("/")[2], access=OWNER)
    for answer in (await alice.get(f"{address}/discard"), await alice.post(f"{address}/discard")):
        assert answer.status_code == 404
        assert "No such invoice." in answer.text


async def test_an_invalid_month_is_reported_on_the_list(console: ConsoleApp) -> None:
    alice = await console.alice()
    answer = await alice.post("/invoices", tenant=console.cast.bob.tenant.id, month="soon")
    assert answer.status_code == 422
    assert "soon" in answer.text


async def test_a_viewer_can_only_read_invoices_and_another_tenant_sees_none(console: ConsoleApp) -> None:
    await bill_usage(console, console.cast.bob)
    address = await draft(console, await console.alice(), console.cast.bob)
    vera = await console.vera()
    assert (await vera.get(address)).status_code == 200
    assert "/discard" not in (await vera.get(address)).text
    assert (await vera.get(f"{address}/discard")).status_code == 403
    for deed in ("close", "discard"):
        assert (await vera.post(f"{address}/{deed}")).status_code == 403
    mallory = await console.member_of(console.cast.charlie, "manager", email="mallory@example.com")
    assert (await mallory.get(address)).status_code == 404
    assert "bob" not in (await mallory.get("/invoices")).text


async def test_list_and_page_show_the_same_total_including_tax(console: ConsoleApp, clock: FakeClock) -> None:
    await console.services.appliance_records.put("seller", {"name": "Alice Ltd", "tax_label": "VAT", "tax_basis_points": 2000})
    await bill_usage(console, console.cast.bob, completion=50_000_000)
    end_month(clock)
    alice = await console.alice()
    address = await draft(console, alice, console.cast.bob)
    await close(alice, address)
    for path in (address, "/invoices"):
        assert "720.00 EUR" in (await alice.get(path)).text
    assert "VAT 20 %" in (await alice.get(address)).text


async def test_sums_are_listed_in_order_of_computation_as_on_the_pdf(console: ConsoleApp) -> None:
    await console.services.appliance_records.put("seller", {"name": "Alice Ltd", "tax_label": "VAT", "tax_basis_points": 2000})
    await bill_usage(console, console.cast.bob, completion=50_000_000)
    alice = await console.alice()
    page = (await alice.get(await draft(console, alice, console.cast.bob))).text
    sums = (
        "Lines",
        "600.000030 EUR",
        "Rounding",
        "-0.000030 EUR",
        "Net amount",
        "600.00 EUR",
        "VAT 20 %",
        "120.00 EUR",
        "720.",
    )
    positions, after = [], page.index('class="sums"')
    for text in sums:
        after = page.index(text, after)
        positions.append(after)
    assert positions == sorted(positions)


async def test_a_tax_of_zero_is_listed_with_its_rate(console: ConsoleApp) -> None:
    await console.services.appliance_records.put("seller", {"name": "Alice Ltd", "tax_label": "VAT", "tax_basis_points": 2000})
    await bill_usage(console, console.cast.bob)
    alice = await console.alice()
    page = (await alice.get(await draft(console, alice, console.cast.bob))).text
    assert "<dt>VAT 20 %</dt><dd>0.00 EUR</dd>" in page


async def test_an_issuer_without_tax_shows_its_reason_instead_of_a_rate(console: ConsoleApp) -> None:
    seller = {"name": "Alice Ltd", "tax_label": "VAT", "tax_basis_points": 0, "tax_note": "Reverse charge."}
    await console.services.appliance_records.put("seller", seller)
    await bill_usage(console, console.cast.bob)
    alice = await console.alice()
    page = (await alice.get(await draft(console, alice, console.cast.bob))).text
    assert "VAT 0 %" not in page
    assert "Reverse charge." in page


async def test_exact_costs_have_all_digits_and_the_free_allowance_has_no_token_count(console: ConsoleApp) -> None:
    bob = console.cast.bob
    prices = console.services.prices
    price = await prices.add(
        model="demo", currency="EUR", prompt=1_500_000, cached_prompt=0, completion=0, effective_from=START
    )
    entry = pending(bob, request_id=new_id("req"), price=price)
    await console.services.ledger.open(entry)
    await console.services.ledger.settle(posted(entry.request_id, prompt=1615, completion=0))
    await FreeAllowances(console.services.db, console.services.clock).set(bob.tenant.id, MONTH, 1000, access=OWNER)
    alice = await console.alice()
    page = (await alice.get(await draft(console, alice, bob))).text
    assert ">0.0024225 EUR<" in page
    assert ">0.002423 EUR<" in page
    assert '<td data-label="Tokens" class="num">–</td>' in page


async def test_drafting_all_tenants_drafts_only_those_with_something_to_bill(console: ConsoleApp, clock: FakeClock) -> None:
    await bill_usage(console, console.cast.bob)
    alice = await console.alice()
    assert (await alice.post("/invoices", tenant="all", month="soon")).status_code == 422

    for _ in range(2):
        answer = await alice.post("/invoices", tenant="all", month=MONTH)
        assert (answer.status_code, answer.headers["location"]) == (303, "/invoices?state=draft")

    made = (await console.services.invoices.list(access=OWNER)).data
    assert [(head.tenant_id, head.month) for head in made] == [(console.cast.bob.tenant.id, MONTH)]
    end_month(clock)
    await console.services.invoices.close(made[0].id, access=OWNER)
    assert (await (await console.alice()).post("/invoices", tenant="all", month=MONTH)).status_code == 303
    assert len((await console.services.invoices.list(access=OWNER)).data) == 1
    assert (await (await console.vera()).post("/invoices", tenant="all", month=MONTH)).status_code == 403


async def test_drafting_all_tenants_with_nothing_to_bill_says_so(console: ConsoleApp) -> None:
    alice = await console.alice()

    answer = await alice.post("/invoices", tenant="all", month=MONTH)

    assert (answer.status_code, answer.headers["location"]) == (303, "/invoices")
    assert "Nothing was drafted: no tenant has anything left to bill in that month." in (await alice.get("/invoices")).text


async def test_drafting_all_tenants_names_those_that_failed_and_drafts_the_others(console: ConsoleApp) -> None:
    bob, charlie = console.cast.bob, console.cast.charlie
    for currency in ("EUR", "USD"):
        price = await console.services.prices.add(
            model="demo", currency=currency, prompt=1_000_000, cached_prompt=0, completion=0, effective_from=START
        )
        entry = pending(bob, request_id=new_id("req"), price=price)
        await console.services.ledger.open(entry)
        await console.services.ledger.settle(posted(entry.request_id, prompt=50, cached=0, completion=0))
    await bill_usage(console, charlie)

    answer = await (await console.alice()).post("/invoices", tenant="all", month=MONTH)

    assert (answer.status_code, "All invoices were drafted except 1. bob: " in answer.text) == (422, True)
    made = (await console.services.invoices.list(access=OWNER)).data
    assert [head.tenant_id for head in made] == [charlie.tenant.id]


async def test_an_invoice_lists_only_its_own_corrections_with_their_reasons(console: ConsoleApp) -> None:
    for person, note in ((console.cast.bob, "cut off by our restart"), (console.cast.charlie, "a word to charlie")):
        await bill_usage(console, person)
        of_person = LedgerFilter(tenant_id=person.tenant.id)
        event = (await console.services.reports.ledger_page(1, None, of_person, access=OWNER)).data[0]
        await console.services.corrections.add(event.id, Correction(note=note, completion_tokens=-3))
    page = (await (await console.alice()).get(await draft(console, await console.alice(), console.cast.bob))).text
    for text in ("Corrections in this invoice", "cut off by our restart", 'href="/requests/req_', "-0.000036 EUR"):
        assert text in page
    assert "a word to charlie" not in page
