"""Closing all drafts of a month at once in the console: confirmation, failures of single drafts, and permissions."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from appliance.base.ids import new_id
from appliance.metering.invoicing.portions import Expected, Outcome
from appliance.metering.ledger.corrections import Correction
from appliance.metering.usage import LedgerFilter
from appliance.tenancy.access import Access
from tests.support.billing import Tokens, add_price, post_event
from tests.support.cast import OWNER, Person, make_person
from tests.support.clock import FakeClock
from tests.support.console_fixtures import Browser, ConsoleApp
from tests.support.console_invoices import MONTH, bill_usage, draft, end_month
from tests.support.factories import pending
from tests.support.tampering import tamper

CLOSING = f"/invoices/months/{MONTH}/close"


async def confirmation_token(browser: Browser) -> str:
    """Return the value by which the form for closing the month confirms the sums that it showed."""
    page = (await browser.get(CLOSING)).text
    return page.partition('name="confirmed" value="')[2].partition('"')[0]


async def test_after_confirmation_all_drafts_of_a_month_are_closed(console: ConsoleApp, clock: FakeClock) -> None:
    await bill_usage(console, console.cast.bob, completion=1_000_000)
    await bill_usage(console, console.cast.charlie, completion=2_000_000)
    alice = await console.alice()
    addresses = [await draft(console, alice, person) for person in (console.cast.charlie, console.cast.bob)]
    link = f'href="{CLOSING}"'
    assert link not in (await alice.get("/invoices")).text
    end_month(clock)
    alice = await console.alice()
    assert link in (await alice.get("/invoices")).text
    assert link in (await alice.get("/invoices?state=closed")).text

    confirmation = (await alice.fragment(CLOSING)).text
    for text in ("2 invoices in EUR", "<b>36.00 EUR</b>", "Close 2 invoices", "No invoice issuer is entered"):
        assert text in confirmation
    answer = await alice.post(CLOSING, confirmed=await confirmation_token(alice))

    assert (answer.status_code, answer.headers["location"]) == (303, "/invoices?state=closed")
    pages = [(await alice.get(address)).text for address in addresses]
    numbers = ["-0001" if "-0001" in page else "-0002" if "-0002" in page else "" for page in pages]
    assert numbers == ["-0002", "-0001"]
    assert link not in (await alice.get("/invoices")).text
    assert (await alice.get(CLOSING)).status_code == 404


async def test_nothing_is_closed_if_the_sums_have_changed_since_the_confirmation(console: ConsoleApp, clock: FakeClock) -> None:
    await bill_usage(console, console.cast.bob, completion=1_000_000)
    address = await draft(console, await console.alice(), console.cast.bob)
    end_month(clock)
    alice = await console.alice()
    seen = await confirmation_token(alice)
    entry = pending(console.cast.charlie, request_id=new_id("req"))
    await console.services.ledger.open(entry)
    await draft(console, alice, console.cast.charlie)

    answer = await alice.post(CLOSING, confirmed=seen)

    assert (answer.status_code, "have changed" in answer.text) == (422, True)
    assert f'href="{address}/close"' in (await alice.get(address)).text


async def test_nothing_is_closed_if_two_totals_have_changed_and_their_sum_has_not(
    console: ConsoleApp, clock: FakeClock
) -> None:
    people, alice = (console.cast.bob, console.cast.charlie), await console.alice()
    for person in people:
        await bill_usage(console, person, completion=1_000_000)
        await draft(console, alice, person)
    end_month(clock)
    alice = await console.alice()
    seen = await confirmation_token(alice)
    for person, tokens in zip(people, (-10, 10), strict=True):
        of_person = LedgerFilter(tenant_id=person.tenant.id)
        event = (await console.services.reports.ledger_page(1, None, of_person, access=OWNER)).data[0]
        await console.services.corrections.add(event.id, Correction(note="mixed up", completion_tokens=tokens))

    answer = await alice.post(CLOSING, confirmed=seen)

    assert (answer.status_code, "have changed" in answer.text) == (422, True)


async def test_a_total_that_changes_while_the_month_is_closed_is_not_closed_and_named(
    console: ConsoleApp, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for person in (console.cast.bob, console.cast.charlie):
        await bill_usage(console, person, completion=1_000_000)
        await draft(console, await console.alice(), person)
    (event,) = (
        await console.services.reports.ledger_page(
            1, None, LedgerFilter(tenant_id=console.cast.charlie.tenant.id), access=OWNER
        )
    ).data
    end_month(clock)
    alice, invoices = await console.alice(), console.services.invoices
    seen, close_each = await confirmation_token(alice), invoices.close_each

    async def correct_then_close(expected: Mapping[str, Expected], *, access: Access) -> dict[str, Outcome]:
        assert {each.currency for each in expected.values()} == {"EUR"}
        await console.services.corrections.add(event.id, Correction(note="a refund", completion_tokens=-1))
        return await close_each(expected, access=access)

    monkeypatch.setattr(invoices, "close_each", correct_then_close)
    answer = await alice.post(CLOSING, confirmed=seen)

    assert (answer.status_code, "1 closed, 1 not. charlie: " in answer.text) == (422, True)
    assert "12.000018 EUR, not 12.000030 EUR" in answer.text


async def test_a_month_is_confirmed_by_currency_and_without_drafts_in_two_currencies(
    console: ConsoleApp, clock: FakeClock
) -> None:
    alice, services = await console.alice(), console.services
    people = [
        console.cast.bob,
        console.cast.charlie,
        *[await make_person(services.db, clock, name) for name in ("Dora", "Emil")],
    ]
    price = await add_price(services.db)

    async def use(person: Person, tokens: int, currency: str) -> None:
        used = Tokens(prompt=tokens * 1_000_000, completion=0)
        epoch_id = console.cast.epoch_id
        await post_event(services.db, person, clock.now().date(), used, epoch_id=epoch_id, price=price, currency=currency)

    for person, tokens, currency in zip(people, (1, 2, 3, 4), ("USD", "EUR", "USD", "EUR"), strict=True):
        await use(person, tokens, currency)
        await draft(console, alice, person)
    await use(people[3], 5, "USD")
    end_month(clock)
    alice = await console.alice()

    page = (await alice.get(CLOSING)).text
    assert "1 invoice in EUR</dt><dd><b>2.00 EUR" in page
    assert "2 invoices in USD</dt><dd><b>4.00 USD" in page
    assert f"<b>Emil</b>: the invoice of {MONTH} would have costs in EUR and USD" in page

    answer = await alice.post(CLOSING, confirmed=await confirmation_token(alice))

    assert (answer.status_code, answer.headers["location"]) == (303, "/invoices?state=closed")
    heads = (await services.invoices.list(access=OWNER)).data
    assert {head.tenant_id: head.state for head in heads} == {
        person.tenant.id: "draft" if person is people[3] else "closed" for person in people
    }


async def damage_events_of(console: ConsoleApp, person: Person) -> None:
    """Change the stored cost of a tenant's events, so that it no longer is their tokens times their prices."""
    of_tenant = f"tenant_id = '{person.tenant.id}'"
    await tamper(console.services.db, f"UPDATE usage_events SET cost_picos = cost_picos + 1 WHERE {of_tenant}")


async def test_a_tenant_whose_events_contradict_their_costs_is_named_and_the_others_are_closed(
    console: ConsoleApp, clock: FakeClock
) -> None:
    for person in (console.cast.bob, console.cast.charlie):
        await bill_usage(console, person, completion=1_000_000)
        broken = await draft(console, await console.alice(), person)
    end_month(clock)
    await damage_events_of(console, console.cast.charlie)
    alice = await console.alice()

    page = (await alice.get(CLOSING)).text
    assert "Close 1 invoice<" in page
    assert "<b>charlie</b>: the ledger contradicts itself: events of demo" in page
    answer = await alice.post(CLOSING, confirmed=await confirmation_token(alice))

    assert (answer.status_code, answer.headers["location"]) == (303, "/invoices?state=closed")
    heads = (await console.services.invoices.list(access=OWNER)).data
    assert {head.tenant_id: head.state for head in heads} == {
        console.cast.bob.tenant.id: "closed", console.cast.charlie.tenant.id: "draft",
    }  # fmt: skip
    shown = await alice.get(broken)
    assert (shown.status_code, "The ledger contradicts itself" in shown.text) == (200, True)
    assert f"{broken}/discard" in shown.text


async def test_drafting_all_tenants_names_one_whose_events_contradict_their_costs(
    console: ConsoleApp, clock: FakeClock
) -> None:
    for person in (console.cast.bob, console.cast.charlie):
        await bill_usage(console, person)
    await damage_events_of(console, console.cast.bob)
    answer = await (await console.alice()).post("/invoices", tenant="all", month=MONTH)

    assert answer.status_code == 422
    assert "All invoices were drafted except 1. bob: The ledger contradicts itself" in answer.text
    heads = (await console.services.invoices.list(access=OWNER)).data
    assert [head.tenant_id for head in heads] == [console.cast.charlie.tenant.id]


async def test_if_no_draft_of_a_month_can_be_closed_the_reasons_are_shown(console: ConsoleApp, clock: FakeClock) -> None:
    await bill_usage(console, console.cast.bob)
    await draft(console, await console.alice(), console.cast.bob)
    end_month(clock)
    await damage_events_of(console, console.cast.bob)
    answer = await (await console.alice()).get(CLOSING)

    assert answer.status_code == 404
    assert "bob: the ledger contradicts itself" in answer.text


async def test_a_draft_that_cannot_be_closed_is_reported_and_the_others_are_closed(
    console: ConsoleApp, clock: FakeClock
) -> None:
    await bill_usage(console, console.cast.bob)
    end_month(clock)
    await bill_usage(console, console.cast.bob)
    alice = await console.alice()
    later = f"{clock.now():%Y-%m}"
    for person in (console.cast.bob, console.cast.charlie):
        assert (await alice.post("/invoices", tenant=person.tenant.id, month=later)).status_code == 303
    end_month(clock)
    alice = await console.alice()
    page = (await alice.get(f"/invoices/months/{later}/close")).text
    seen = page.partition('name="confirmed" value="')[2].partition('"')[0]

    answer = await alice.post(f"/invoices/months/{later}/close", confirmed=seen)

    assert answer.status_code == 422
    assert f"1 closed, 1 not. bob: {MONTH} must be closed before {later}" in answer.text
    assert "1 invoice in EUR" in answer.text
    assert "Close 1 invoice<" in answer.text


async def test_a_draft_discarded_while_the_month_is_closed_does_not_stop_the_others(
    console: ConsoleApp, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = []
    for person in (console.cast.bob, console.cast.charlie):
        await bill_usage(console, person)
        addresses.append(await draft(console, await console.alice(), person))
    end_month(clock)
    alice, invoices = await console.alice(), console.services.invoices
    seen, close_each = await confirmation_token(alice), invoices.close_each

    async def discard_then_close(expected: Mapping[str, Expected], *, access: Access) -> dict[str, Outcome]:
        await invoices.discard(addresses[0].rpartition("/")[2], access=OWNER)
        return await close_each(expected, access=access)

    monkeypatch.setattr(invoices, "close_each", discard_then_close)
    answer = await alice.post(CLOSING, confirmed=seen)

    assert (answer.status_code, answer.headers.get("location")) == (303, "/invoices?state=closed")
    assert [head.state for head in (await invoices.list(access=OWNER)).data] == ["closed"]


async def test_drafts_of_other_months_are_not_closed(console: ConsoleApp, clock: FakeClock) -> None:
    await bill_usage(console, console.cast.bob)
    await draft(console, await console.alice(), console.cast.bob)
    end_month(clock)
    await bill_usage(console, console.cast.charlie)
    later = f"{clock.now():%Y-%m}"
    alice = await console.alice()
    await alice.post("/invoices", tenant=console.cast.charlie.tenant.id, month=later)
    end_month(clock)
    alice = await console.alice()
    assert "Close 1 invoice<" in (await alice.get(CLOSING)).text
    await alice.post(CLOSING, confirmed=await confirmation_token(alice))

    heads = (await console.services.invoices.list(access=OWNER)).data
    assert {head.month: head.state for head in heads} == {MONTH: "closed", later: "draft"}


async def test_only_billing_roles_can_close_a_month(console: ConsoleApp, clock: FakeClock) -> None:
    await bill_usage(console, console.cast.bob)
    address = await draft(console, await console.alice(), console.cast.bob)
    end_month(clock)
    seen = await confirmation_token(await console.alice())
    manager = await console.member_of(console.cast.bob, "manager")

    for browser in (manager, await console.vera()):
        assert (await browser.get(CLOSING)).status_code == 403
        assert (await browser.post(CLOSING, confirmed=seen)).status_code == 403
        assert CLOSING not in (await browser.get("/invoices")).text
    assert f'href="{address}/close"' in (await (await console.alice()).get(address)).text
    assert (await (await console.alice()).get("/invoices/months/soon/close")).status_code == 400
