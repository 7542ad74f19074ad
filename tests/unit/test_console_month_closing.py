"""All drafts of a month closed in one go in the console, as confirmed and by those who may bill."""

from __future__ import annotations

import pytest

from appliance.base.ids import new_id
from appliance.metering.invoicing.rows import Invoice
from appliance.tenancy.access import WHOLE_APPLIANCE, Access
from tests.support.clock import FakeClock
from tests.support.console_fixtures import Browser, ConsoleApp
from tests.support.factories import pending
from tests.unit.test_console_invoices import MONTH, drafted, over, use

CLOSING = f"/invoices/months/{MONTH}/close"


async def confirmed(browser: Browser) -> str:
    """Return what the form for closing the month sends back."""
    page = (await browser.get(CLOSING)).text
    return page.partition('name="confirmed" value="')[2].partition('"')[0]


async def test_all_drafts_of_a_month_are_closed_after_their_number_and_sums_are_confirmed(
    console: ConsoleApp, clock: FakeClock
) -> None:
    await use(console, console.cast.bob, completion=1_000_000)
    await use(console, console.cast.charlie, completion=2_000_000)
    alice = await console.alice()
    addresses = [await drafted(console, alice, person) for person in (console.cast.charlie, console.cast.bob)]
    link = f'href="{CLOSING}"'
    assert link not in (await alice.get("/invoices")).text
    over(clock)
    alice = await console.alice()
    assert link in (await alice.get("/invoices")).text
    assert link in (await alice.get("/invoices?state=closed")).text

    asked = (await alice.fragment(CLOSING)).text
    for text in ("2 invoices in EUR", "<b>36.00 EUR</b>", "Close 2 invoices", "No invoice issuer is entered"):
        assert text in asked
    answer = await alice.post(CLOSING, confirmed=await confirmed(alice))

    assert (answer.status_code, answer.headers["location"]) == (303, "/invoices?state=closed")
    pages = [(await alice.get(address)).text for address in addresses]
    numbers = ["-0001" if "-0001" in page else "-0002" if "-0002" in page else "" for page in pages]
    assert numbers == ["-0002", "-0001"]
    assert link not in (await alice.get("/invoices")).text
    assert (await alice.get(CLOSING)).status_code == 404


async def test_no_other_sums_are_closed_than_those_confirmed(console: ConsoleApp, clock: FakeClock) -> None:
    await use(console, console.cast.bob, completion=1_000_000)
    address = await drafted(console, await console.alice(), console.cast.bob)
    over(clock)
    alice = await console.alice()
    seen = await confirmed(alice)
    entry = pending(console.cast.charlie, request_id=new_id("req"))
    await console.services.ledger.open(entry)
    await drafted(console, alice, console.cast.charlie)

    answer = await alice.post(CLOSING, confirmed=seen)

    assert (answer.status_code, "have changed" in answer.text) == (422, True)
    assert f'href="{address}/close"' in (await alice.get(address)).text


async def test_a_draft_that_cannot_be_closed_stays_with_its_reason_while_the_others_are_closed(
    console: ConsoleApp, clock: FakeClock
) -> None:
    await use(console, console.cast.bob)
    over(clock)
    await use(console, console.cast.bob)
    alice = await console.alice()
    later = f"{clock.now():%Y-%m}"
    for person in (console.cast.bob, console.cast.charlie):
        assert (await alice.post("/invoices", tenant=person.tenant.id, month=later)).status_code == 303
    over(clock)
    alice = await console.alice()
    page = (await alice.get(f"/invoices/months/{later}/close")).text
    seen = page.partition('name="confirmed" value="')[2].partition('"')[0]

    answer = await alice.post(f"/invoices/months/{later}/close", confirmed=seen)

    assert answer.status_code == 422
    assert f"1 closed, 1 not. bob: {MONTH} must be closed before {later}" in answer.text
    assert "1 invoice in EUR" in answer.text
    assert "Close 1 invoice<" in answer.text


async def test_a_draft_that_is_discarded_while_its_month_is_closed_keeps_no_other_from_being_closed(
    console: ConsoleApp, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = []
    for person in (console.cast.bob, console.cast.charlie):
        await use(console, person)
        addresses.append(await drafted(console, await console.alice(), person))
    over(clock)
    alice, invoices = await console.alice(), console.services.invoices
    seen, close = await confirmed(alice), invoices.close

    async def close_after_another(invoice_id: str, *, access: Access) -> Invoice:
        if addresses[0].endswith(invoice_id):
            await invoices.discard(invoice_id, access=WHOLE_APPLIANCE)
        return await close(invoice_id, access=access)

    monkeypatch.setattr(invoices, "close", close_after_another)
    answer = await alice.post(CLOSING, confirmed=seen)

    assert (answer.status_code, answer.headers.get("location")) == (303, "/invoices?state=closed")
    assert [head.state for head in (await invoices.list(access=WHOLE_APPLIANCE)).data] == ["closed"]


async def test_only_who_may_bill_closes_a_month(console: ConsoleApp, clock: FakeClock) -> None:
    await use(console, console.cast.bob)
    address = await drafted(console, await console.alice(), console.cast.bob)
    member = await console.services.members.create("manager@example.com", "the manager's long password", "member")
    await console.services.memberships.add(console.cast.bob.tenant.id, member.id, "manager", access=WHOLE_APPLIANCE)
    over(clock)
    seen = await confirmed(await console.alice())
    manager = await console.visitor().sign_in("manager@example.com", "the manager's long password")

    for browser in (manager, await console.vera()):
        assert (await browser.get(CLOSING)).status_code == 403
        assert (await browser.post(CLOSING, confirmed=seen)).status_code == 403
        assert CLOSING not in (await browser.get("/invoices")).text
    assert f'href="{address}/close"' in (await (await console.alice()).get(address)).text
    assert (await (await console.alice()).get("/invoices/months/soon/close")).status_code == 400
