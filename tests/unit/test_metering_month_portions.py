"""Drafting and closing a month for several tenants together: errors about single ones, interruptions, and permissions."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.db import Database
from appliance.base.errors import InvoiceClosed, InvoiceInconsistent, NotFound, NothingToBill, RoleNotAllowed, TotalChanged
from appliance.metering.invariants import invoices as invariants
from appliance.metering.invoicing import invoices as service
from appliance.metering.invoicing import portions, rows
from appliance.metering.invoicing.computation import read_sums_ahead
from appliance.metering.invoicing.portions import Expected
from appliance.metering.invoicing.rows import Invoice
from appliance.metering.ledger.corrections import Correction
from appliance.tenancy.roles import TenantRole
from tests.support.alerts import TARGET, alert_parts
from tests.support.billing import Tokens, add_price
from tests.support.cast import OWNER, Cast, Person, make_person, member_of
from tests.support.clock import FakeClock
from tests.support.invoice_books import Books
from tests.support.ledgers import all_events, utc_corrections
from tests.support.sql_statements import record_statements
from tests.support.tampering import tamper

MONTH, DAY = "2026-10", date(2026, 10, 5)


@pytest.fixture
async def books(database: Database, clock: FakeClock, cast: Cast) -> Books:
    return Books(database, clock, cast, await add_price(database))


@pytest.fixture
async def people(books: Books, monkeypatch: pytest.MonkeyPatch) -> list[Person]:
    """Return five tenants, each with usage in October, of whom two fit into a portion."""
    monkeypatch.setattr(service, "PORTION_TENANTS", 2)
    people = [await make_person(books.database, books.clock, f"tenant {number}") for number in range(5)]
    for number, person in enumerate(people, 1):
        await books.post(DAY, Tokens(prompt=number, completion=0), person=person)
    return people


async def draft_all(books: Books, people: Sequence[Person]) -> list[str]:
    """Draft October for these tenants, and return the ids of the drafts."""
    drafted = await books.invoices.draft_each([one.tenant.id for one in people], MONTH, access=OWNER)
    return [outcome.head.id for outcome in drafted.values() if isinstance(outcome, Invoice)]


async def close_all(books: Books, ids: Sequence[str]) -> list[Any]:
    closed = await books.invoices.close_each(dict.fromkeys(ids, Expected()), access=OWNER)
    return [closed[invoice_id] for invoice_id in ids]


async def test_invoices_closed_together_are_numbered_in_the_given_order(books: Books, people: list[Person]) -> None:
    ids = (await draft_all(books, people))[::-1]
    closed = await close_all(books, ids)
    assert [invoice.head.id for invoice in closed] == ids
    assert [invoice.head.number for invoice in closed] == [f"2026-000{count}" for count in range(1, 6)]
    assert [invoice.totals.total_micros for invoice in closed] == [5, 4, 3, 2, 1]


async def test_invoices_drafted_together_are_listed_in_the_order_of_their_numbers(
    books: Books, people: list[Person], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "PORTION_TENANTS", len(people))
    await close_all(books, await draft_all(books, people))
    listed = await books.invoices.list(access=OWNER)
    assert [head.number for head in listed.data] == [f"2026-000{count}" for count in range(5, 0, -1)]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_reasons_are_read_only_of_tenants_with_corrections(
    books: Books, people: list[Person], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "PORTION_TENANTS", len(people))
    corrected = (await all_events(books.database))[2]
    await utc_corrections(books.database, books.clock).add(corrected.id, Correction(note="our apologies", prompt_tokens=-1))
    with record_statements() as statements:
        drafted = await books.invoices.draft_each([one.tenant.id for one in people], MONTH, access=OWNER)

    reasons = [[line.reasons for line in invoice.lines] for invoice in drafted.values() if isinstance(invoice, Invoice)]
    assert reasons == [[()], [()], [(), ("our apologies",)], [()], [()]]
    (of_notes,) = (statement for statement in statements if "usage_events.note IS NOT NULL" in statement)
    assert "usage_events.tenant_id IN (?)" in of_notes


async def test_an_interrupted_closing_is_completed_by_repeating_it(
    books: Books, people: list[Person], monkeypatch: pytest.MonkeyPatch
) -> None:
    alerts = alert_parts(books.database, books.clock)
    await alerts.webhooks.create(kind="webhook", target=TARGET, access=OWNER)
    ids, store_closed = await draft_all(books, people), rows.store_closed

    async def fail_second(connection: AsyncConnection, closed: Sequence[Invoice]) -> None:
        await store_closed(connection, closed)
        if closed[0].head.id == ids[2]:
            raise OSError("the disk is full")

    monkeypatch.setattr(rows, "store_closed", fail_second)
    with pytest.raises(OSError, match="full"):
        await close_all(books, ids)
    monkeypatch.setattr(rows, "store_closed", store_closed)
    drafts = await books.invoices.drafts_of_month(MONTH, access=OWNER)
    assert {draft.head.id for draft in drafts} == set(ids[2:])
    outcomes = await close_all(books, ids)

    assert [type(outcome) for outcome in outcomes] == [InvoiceClosed, InvoiceClosed, Invoice, Invoice, Invoice]
    stored = [await books.invoices.get(invoice_id, access=OWNER) for invoice_id in ids]
    assert [invoice.head.number for invoice in stored] == [f"2026-000{count}" for count in range(1, 6)]
    assert [invoice.totals.total_micros for invoice in stored] == [1, 2, 3, 4, 5]
    subjects = [message.payload["data"]["invoice_id"] for message in await alerts.messages()]
    assert sorted(subjects) == sorted(ids)
    async with books.database.reading() as connection:
        assert (await invariants.check(connection)).state == "holds"


async def test_an_interrupted_drafting_is_completed_by_repeating_it(
    books: Books, people: list[Person], monkeypatch: pytest.MonkeyPatch
) -> None:
    insert_drafts = rows.insert_drafts

    async def fail_second(connection: AsyncConnection, heads: Any) -> None:
        await insert_drafts(connection, heads)
        if heads[0].tenant_id == people[2].tenant.id:
            raise OSError("the disk is full")

    monkeypatch.setattr(rows, "insert_drafts", fail_second)
    with pytest.raises(OSError, match="full"):
        await draft_all(books, people)
    monkeypatch.setattr(rows, "insert_drafts", insert_drafts)
    before = {head.id for head in (await books.invoices.list(month=MONTH, access=OWNER)).data}
    ids = await draft_all(books, people)

    assert before == set(ids[:2])
    assert {head.id for head in (await books.invoices.list(month=MONTH, access=OWNER)).data} == set(ids)


async def test_events_posted_while_a_portion_is_closed_are_on_the_invoice_of_their_tenant(
    books: Books, people: list[Person], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await draft_all(books, people)

    async def posted_meanwhile(connection: AsyncConnection, month: str, tenant_ids: Sequence[str]) -> Any:
        ahead = await read_sums_ahead(connection, month, tenant_ids)
        await books.post(DAY, Tokens(prompt=100, completion=0), person=people[1])
        return ahead

    monkeypatch.setattr(portions, "read_sums_ahead", posted_meanwhile)
    closed = await close_all(books, ids)
    monkeypatch.undo()

    assert [invoice.totals.total_micros for invoice in closed] == [1, 102, 3, 4, 5]
    late = await books.draft("2026-11", people[1])
    assert [(line.month, line.tokens) for line in late.lines] == [(MONTH, 200)]


async def test_a_tenant_whose_earlier_month_is_closed_meanwhile_does_not_pay_it_twice(
    books: Books, people: list[Person], monkeypatch: pytest.MonkeyPatch
) -> None:
    await books.post(date(2026, 9, 5), Tokens(prompt=50, completion=0), person=people[1])
    ids, september = await draft_all(books, people), await books.draft("2026-09", people[1])

    async def closed_meanwhile(connection: AsyncConnection, month: str, tenant_ids: Sequence[str]) -> Any:
        ahead = await read_sums_ahead(connection, month, tenant_ids)
        monkeypatch.setattr(portions, "read_sums_ahead", read_sums_ahead)
        await books.invoices.close(september.head.id, access=OWNER)
        return ahead

    monkeypatch.setattr(portions, "read_sums_ahead", closed_meanwhile)
    closed = await close_all(books, ids)

    assert [invoice.totals.total_micros for invoice in closed] == [1, 2, 3, 4, 5]


async def test_errors_of_single_tenants_do_not_stop_those_closed_with_them(books: Books, people: list[Person]) -> None:
    ids = await draft_all(books, people)
    broken = people[0].tenant.id
    await tamper(books.database, f"UPDATE usage_events SET cost_picos = cost_picos + 1 WHERE tenant_id = '{broken}'")
    await books.invoices.discard(ids[3], access=OWNER)
    expected = {invoice_id: Expected(2 if invoice_id == ids[1] else 7 if invoice_id == ids[2] else None) for invoice_id in ids}

    outcomes = await books.invoices.close_each(expected, access=OWNER)

    assert [type(outcomes[invoice_id]) for invoice_id in ids] == [
        InvoiceInconsistent, Invoice, TotalChanged, NotFound, Invoice,
    ]  # fmt: skip
    heads = (await books.invoices.list(state="closed", access=OWNER)).data
    assert sorted(head.number or "" for head in heads) == ["2026-0001", "2026-0002"]


async def test_errors_of_single_tenants_do_not_stop_those_drafted_with_them(books: Books, people: list[Person]) -> None:
    broken, unused = people[0].tenant.id, books.bob.tenant.id
    await books.close(MONTH, people[1])
    await tamper(books.database, f"UPDATE usage_events SET cost_picos = cost_picos + 1 WHERE tenant_id = '{broken}'")
    tenant_ids = [broken, people[1].tenant.id, unused, "no tenant", people[4].tenant.id]

    outcomes = await books.invoices.draft_each(tenant_ids, MONTH, only="billable", access=OWNER)

    assert [type(outcomes[tenant_id]) for tenant_id in tenant_ids] == [
        InvoiceInconsistent, InvoiceClosed, NothingToBill, NotFound, Invoice,
    ]  # fmt: skip
    heads = (await books.invoices.list(state="draft", access=OWNER)).data
    assert [head.tenant_id for head in heads] == [people[4].tenant.id]


async def test_the_drafts_of_a_month_have_their_totals_or_a_problem(books: Books, people: list[Person]) -> None:
    await draft_all(books, people)
    await books.close(MONTH, people[4])
    broken = people[0].tenant.id
    await tamper(books.database, f"UPDATE usage_events SET cost_picos = cost_picos + 1 WHERE tenant_id = '{broken}'")

    drafts = {draft.head.tenant_id: draft for draft in await books.invoices.drafts_of_month(MONTH, access=OWNER)}

    assert [drafts[one.tenant.id].totals.total_micros for one in people[1:4]] == [2, 3, 4]
    assert "contradicts itself" in (drafts[broken].problem or "")
    assert len(drafts) == 4


async def test_nothing_is_billed_together_without_permission_for_each_tenant(books: Books, people: list[Person]) -> None:
    ids = await draft_all(books, people[:2])
    own, foreign = (one.tenant.id for one in people[:2])
    manager = member_of(own, TenantRole.MANAGER)
    with pytest.raises(RoleNotAllowed):
        await books.invoices.draft_each([own], MONTH, access=manager)
    with pytest.raises(NotFound):
        await books.invoices.draft_each([foreign], MONTH, access=manager)
    closed = await books.invoices.close_each(dict.fromkeys(ids, Expected()), access=manager)
    assert [type(closed[invoice_id]) for invoice_id in ids] == [RoleNotAllowed, NotFound]
    assert await books.invoices.drafts_of_month(MONTH, access=manager) == []
