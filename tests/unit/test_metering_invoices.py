"""Invoices: what drafts contain, what closing freezes, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.acting import SYSTEM, Actor, acting
from appliance.base.counters import last_taken
from appliance.base.db import Database
from appliance.base.errors import (
    CurrenciesMixed,
    GatehouseError,
    InvalidValue,
    InvoiceClosed,
    MonthNotOver,
    MonthOutOfOrder,
    NotFound,
    NothingToBill,
    RoleNotAllowed,
)
from appliance.base.money import format_micros
from appliance.base.tables import audit_log, invoice_lines
from appliance.metering.appliance_records import SELLER, ApplianceRecords
from appliance.metering.calendar import BillingCalendar
from appliance.metering.invoicing import portions
from appliance.metering.invoicing.computation import read_sums_ahead
from appliance.metering.invoicing.free_allowances import allowance_in
from appliance.metering.invoicing.lines import EventSums, MonthAllowance, allowance_lines, totals_of, usage_lines, usage_picos
from appliance.metering.invoicing.rows import Invoice, InvoiceHead
from appliance.metering.invoicing.seller import Seller
from appliance.metering.invoicing.wording import ABORT_POLICY
from appliance.tenancy.access import Access
from appliance.tenancy.audit import AuditLog
from appliance.tenancy.principals import TenantChanges
from appliance.tenancy.roles import Role, TenantRole
from appliance.tenancy.tenants import Tenants
from tests.support.alerts import TARGET, alert_parts
from tests.support.billing import Tokens, add_price
from tests.support.cast import OWNER, Cast, change_tenant, make_person
from tests.support.clock import FakeClock
from tests.support.invoice_books import Books
from tests.support.ledgers import euro_invoices

SEPTEMBER, OCTOBER, NOVEMBER = date(2026, 9, 10), date(2026, 10, 15), date(2026, 11, 3)


@pytest.fixture
async def books(database: Database, clock: FakeClock, cast: Cast) -> Books:
    return Books(database, clock, cast, await add_price(database))


def line_values(invoice: Invoice) -> list[tuple[str | None, str, str, int, int]]:
    return [(line.model, line.kind, line.month, line.tokens, line.rounded_micros) for line in invoice.lines]


async def test_a_draft_has_a_line_for_each_model_kind_and_unit_price(books: Books) -> None:
    dearer = await add_price(books.database, prompt=2_000_000)
    await books.post(OCTOBER, Tokens(prompt=100, cached=40, completion=7))
    await books.post(OCTOBER, Tokens(prompt=10, completion=1), price=dearer)
    await books.post(OCTOBER, Tokens(prompt=10, completion=1), basis_points=5000)
    await books.post(OCTOBER, Tokens(prompt=5, completion=0), model="another")

    drafted = await books.draft("2026-10")

    lines = [(line.model, line.kind, line.unit_price, line.tokens, line.requests, line.exact_picos) for line in drafted.lines]
    assert lines == [
        ("another", "prompt", 1_000_000, 5, 1, 5_000_000),
        ("demo", "prompt", 500_000, 10, 1, 5_000_000),
        ("demo", "prompt", 1_000_000, 60, 1, 60_000_000),
        ("demo", "prompt", 2_000_000, 10, 1, 20_000_000),
        ("demo", "cached_prompt", 100_000, 40, 1, 4_000_000),
        ("demo", "completion", 1_500_000, 1, 1, 1_500_000),
        ("demo", "completion", 3_000_000, 8, 2, 24_000_000),
    ]
    assert drafted.is_draft
    assert drafted.head.number is None
    assert drafted.totals.total_micros == 5 + 5 + 60 + 20 + 4 + 2 + 24


async def test_a_draft_is_recomputed_on_each_read(books: Books) -> None:
    await books.post(NOVEMBER)
    first = await books.draft("2026-11")
    cost = await books.post(NOVEMBER)
    second = await books.invoices.get(first.head.id, access=OWNER)

    assert (await books.draft("2026-11")).head.id == first.head.id
    assert usage_picos(second.lines) == usage_picos(first.lines) + cost


async def test_closing_assigns_gapless_numbers_and_freezes_seller_and_buyer(books: Books) -> None:
    records = ApplianceRecords(books.database, books.clock)
    await records.put(SELLER, Seller(name="Box AG", tax_basis_points=1900, payment_terms_days=14).to_record())
    billing = {"address": "Bob Street 7", "tax_id": "DE123456789"}
    changes = TenantChanges(billing=billing)
    await Tenants(books.database, books.clock).update(books.bob.tenant.id, changes, access=OWNER)
    million = Tokens(prompt=1_000_000, completion=0)
    await books.post(OCTOBER, million)
    await books.post(OCTOBER, person=books.cast.charlie)
    first = await books.close("2026-10")
    other = await books.close("2026-10", books.cast.charlie)
    await records.put(SELLER, Seller(name="Another AG").to_record())
    await books.post(OCTOBER)
    read = await books.invoices.get(first.head.id, access=OWNER)

    assert (first.head.number, other.head.number) == ("2026-0001", "2026-0002")
    assert read == first
    assert (read.seller["name"], read.buyer) == ("Box AG", {"name": "bob", **billing})
    assert (read.totals.subtotal_micros, read.totals.tax_micros, read.totals.due_micros) == (1_000_000, 190_000, 1_190_000)
    assert (read.issued_on, read.due_on) == (date(2026, 11, 21), date(2026, 12, 5))


async def test_invoices_of_one_tenant_do_not_depend_on_those_of_others(books: Books) -> None:
    bob, charlie = books.bob, books.cast.charlie
    for day in (SEPTEMBER, OCTOBER):
        for person in (bob, charlie):
            await books.allowances.set(person.tenant.id, f"{day:%Y-%m}", 10, access=OWNER)
            await books.post(day, Tokens(prompt=20, completion=0), person=person)
    closed = [await books.close("2026-09"), await books.close("2026-09", charlie), await books.close("2026-10", charlie)]
    closed.append(await books.close("2026-10"))

    assert [invoice.totals.subtotal_micros for invoice in closed] == [20 - 10] * 4


async def test_the_events_of_a_closed_invoice_stay_the_same_after_later_events(books: Books) -> None:
    await books.post(SEPTEMBER, Tokens(prompt=1))
    first = await books.close("2026-09")
    await books.post(SEPTEMBER, Tokens(prompt=2))  # late
    await books.post(OCTOBER, Tokens(prompt=3))
    second = await books.close("2026-10")

    listed = [(await books.invoices.events(invoice.head.id, access=OWNER)).data for invoice in (first, second)]
    assert [[event.prompt_tokens for event in events] for events in listed] == [[1], [2, 3]]


async def test_an_event_posted_during_closing_is_on_the_invoice(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    await books.post(OCTOBER, Tokens(prompt=10, completion=0))
    drafted = await books.draft("2026-10")
    since: list[int] = []

    async def posted_meanwhile(connection: AsyncConnection, month: str, tenant_ids: Sequence[str]) -> Any:
        ahead = await read_sums_ahead(connection, month, tenant_ids)
        since.append(await books.post(OCTOBER, Tokens(prompt=7, completion=0)))
        return ahead

    monkeypatch.setattr(portions, "read_sums_ahead", posted_meanwhile)
    closed = await books.invoices.close(drafted.head.id, access=OWNER)
    monkeypatch.undo()

    assert closed.head.through_posting == 2
    assert line_values(closed) == [("demo", "prompt", "2026-10", 17, 17)]
    assert (await books.draft("2026-11")).lines == ()


async def test_closing_an_invoice_sends_one_message(books: Books) -> None:
    alerts = alert_parts(books.database, books.clock)
    await alerts.webhooks.create(kind="webhook", target=TARGET, tenant_id=books.bob.tenant.id, access=OWNER)
    changes = TenantChanges(billing={"name": "Bob Builders Ltd"})
    await Tenants(books.database, books.clock).update(books.bob.tenant.id, changes, access=OWNER)
    await books.post(OCTOBER)
    closed = await books.close("2026-10")
    assert closed.buyer["name"] == "Bob Builders Ltd"
    with pytest.raises(InvoiceClosed):
        await books.invoices.close(closed.head.id, access=OWNER)
    (message,) = await alerts.messages()
    assert message.event == "invoice.closed"
    assert message.payload["data"] == {
        "tenant_id": books.bob.tenant.id,
        "tenant_name": "bob",
        "invoice_id": closed.head.id,
        "number": closed.head.number,
        "month": "2026-10",
        "total_micros": closed.head.total_micros,
        "tax_micros": closed.head.tax_micros,
        "due_micros": closed.totals.due_micros,
        "currency": "EUR",
    }


async def test_months_closed_concurrently_count_no_event_twice(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    books.clock.jump_wall(10 * 86400)
    await books.post(OCTOBER, Tokens(prompt=10, completion=0))
    await books.post(NOVEMBER, Tokens(prompt=3, completion=0))
    october, november = await books.draft("2026-10"), await books.draft("2026-11")

    async def closed_meanwhile(connection: AsyncConnection, month: str, tenant_ids: Sequence[str]) -> Any:
        ahead = await read_sums_ahead(connection, month, tenant_ids)
        monkeypatch.undo()
        await books.invoices.close(october.head.id, access=OWNER)
        return ahead

    monkeypatch.setattr(portions, "read_sums_ahead", closed_meanwhile)
    closed = await books.invoices.close(november.head.id, access=OWNER)
    assert line_values(closed) == [("demo", "prompt", "2026-11", 3, 3)]


async def test_invoices_are_numbered_in_the_year_of_closing(books: Books) -> None:
    await books.post(OCTOBER)
    assert (await books.close("2026-10")).head.number == "2026-0001"
    books.clock.jump_wall(60 * 86400)
    await books.post(NOVEMBER)
    await books.post(date(2026, 12, 1))
    numbers = [(await books.close(month)).head.number for month in ("2026-11", "2026-12")]
    assert numbers == ["2027-0001", "2027-0002"]


async def test_late_events_and_corrections_are_adjustments_on_the_next_invoice(books: Books) -> None:
    books.clock.jump_wall(10 * 86400)
    await books.post(OCTOBER)
    await books.post(SEPTEMBER, Tokens(prompt=1, completion=0))
    await books.close("2026-09")
    closed = await books.close("2026-10")
    late = await books.post(OCTOBER, Tokens(prompt=3, completion=2))
    taken_back = await books.post(SEPTEMBER, Tokens(prompt=-1, completion=0), is_correction=True)
    await books.post(NOVEMBER)

    following = await books.close("2026-11")

    assert await books.invoices.get(closed.head.id, access=OWNER) == closed
    assert line_values(following)[2:] == [("demo", "adjustment", "2026-09", -1, -1), ("demo", "adjustment", "2026-10", 5, 9)]
    assert following.lines[-1].exact_picos == late
    assert following.lines[-2].exact_picos == taken_back
    assert [line.requests for line in following.lines[2:]] == [0, 1]


async def test_a_correction_in_its_own_month_has_a_line(books: Books) -> None:
    await books.post(OCTOBER, Tokens(prompt=10, completion=0))
    await books.post(OCTOBER, Tokens(prompt=-4, completion=0), is_correction=True)

    assert line_values(await books.draft("2026-10")) == [
        ("demo", "prompt", "2026-10", 10, 10),
        ("demo", "adjustment", "2026-10", -4, -4),
    ]


async def test_a_closed_invoice_cannot_be_closed_again_or_drafted_again(books: Books) -> None:
    await books.post(OCTOBER)
    closed = await books.close("2026-10")

    with pytest.raises(InvoiceClosed, match="2026-0001") as again:
        await books.invoices.close(closed.head.id, access=OWNER)
    with pytest.raises(InvoiceClosed):
        await books.draft("2026-10")
    assert (again.value.status, again.value.code) == (409, "invoice_closed")
    async with books.database.reading() as connection:
        assert await last_taken(connection, "invoice:2026") == 1


async def test_a_month_that_is_not_over_can_be_drafted_but_not_closed(books: Books) -> None:
    await books.post(NOVEMBER)
    with pytest.raises(MonthNotOver, match="2026-11 is not over before 2026-12-01 00:00 UTC"):
        await books.close("2026-11")
    with pytest.raises(InvalidValue, match="2026-12 has not begun"):
        await books.draft("2026-12")
    with pytest.raises(InvalidValue, match="2000-01 or later"):
        await books.draft("1999-12")
    with pytest.raises(InvalidValue, match="YYYY-MM"):
        await books.draft("November")


async def test_a_month_ends_at_midnight_of_the_billing_time_zone(books: Books) -> None:
    zurich = euro_invoices(books.database, books.clock, BillingCalendar("Europe/Zurich"))
    drafted = await zurich.draft(books.bob.tenant.id, "2026-11", access=OWNER)
    books.clock.jump_wall((datetime(2026, 11, 30, 22, 59, 59, tzinfo=UTC) - books.clock.now()).total_seconds())
    with pytest.raises(MonthNotOver):
        await zurich.close(drafted.head.id, access=OWNER)
    books.clock.jump_wall(1)
    closed = await zurich.close(drafted.head.id, access=OWNER)
    assert closed.issued_on == date(2026, 12, 1)


async def test_months_are_closed_in_order_and_the_error_names_the_open_one(books: Books) -> None:
    await books.post(SEPTEMBER)
    await books.post(OCTOBER)
    with pytest.raises(MonthOutOfOrder, match="2026-09 must be closed before 2026-10"):
        await books.close("2026-10")
    await books.close("2026-09")
    await books.close("2026-10")
    with pytest.raises(MonthOutOfOrder, match="2026-10 is already closed"):
        await books.draft("2026-08")


async def test_a_month_without_usage_can_be_skipped_or_closed_empty(books: Books) -> None:
    await books.post(OCTOBER)
    passed, others = await books.draft("2026-09"), await books.draft("2026-09", books.cast.charlie)
    await books.close("2026-10")
    assert (await books.invoices.get(others.head.id, access=OWNER)) == others
    with pytest.raises(NotFound):
        await books.invoices.get(passed.head.id, access=OWNER)

    empty = await books.close("2026-10", books.cast.charlie)
    assert (empty.lines, empty.totals.due_micros, empty.head.number) == ((), 0, "2026-0002")


async def test_a_month_with_only_empty_events_can_be_skipped(books: Books) -> None:
    nothing = Tokens(prompt=0, completion=0)
    await books.post(SEPTEMBER, nothing)  # a crash left it open before its prompt was read
    await books.post(OCTOBER)
    assert [line.kind for line in (await books.close("2026-10")).lines] == ["prompt", "completion"]
    assert (await books.draft("2026-11")).lines == ()


async def test_invoices_closed_concurrently_get_consecutive_numbers(books: Books) -> None:
    people = [await make_person(books.database, books.clock, f"tenant {index}") for index in range(6)]
    for person in people:
        await books.post(OCTOBER, person=person)
    ids = [(await books.draft("2026-10", person)).head.id for person in people]
    ends = await asyncio.gather(*(books.invoices.close(id_, access=OWNER) for id_ in [*ids, *ids]), return_exceptions=True)
    closed = [end for end in ends if isinstance(end, Invoice)]

    assert sorted(invoice.head.number or "" for invoice in closed) == [f"2026-{count:04d}" for count in range(1, 7)]
    assert sum(isinstance(end, InvoiceClosed) for end in ends) == 6


async def test_events_settled_during_closing_are_billed_exactly_once(books: Books) -> None:
    costs = [await books.post(OCTOBER) for _ in range(3)]
    ready = (await books.draft("2026-10")).head.id

    async def settle() -> None:
        for _ in range(10):
            costs.append(await books.post(OCTOBER))
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as settling:
        for _ in range(3):
            settling.create_task(settle())
        closed = await books.invoices.close(ready, access=OWNER)
    assert usage_picos(closed.lines) + usage_picos((await books.draft("2026-11")).lines) == sum(costs)
    assert len(costs) == 33


async def test_late_events_are_billed_in_the_earliest_open_month(books: Books) -> None:
    books.clock.jump_wall(40 * 86400)
    await books.post(SEPTEMBER)
    await books.close("2026-09")
    await books.post(SEPTEMBER)
    await books.post(OCTOBER)
    await books.post(NOVEMBER)

    assert "adjustment" in [line.kind for line in (await books.draft("2026-10")).lines]
    assert "adjustment" not in [line.kind for line in (await books.draft("2026-11")).lines]


async def test_a_free_allowance_deducts_at_most_the_cost_of_the_month(books: Books) -> None:
    await books.allowances.set(books.bob.tenant.id, "2026-01", 15, access=OWNER)
    await books.allowances.set(books.bob.tenant.id, "2026-10", 100, access=OWNER)
    await books.post(SEPTEMBER, Tokens(prompt=40, completion=0))
    await books.post(OCTOBER, Tokens(prompt=40, completion=0))

    september, october = await books.close("2026-09"), await books.close("2026-10")

    assert line_values(september)[-1] == (None, "free_allowance", "2026-09", 0, -15)
    assert september.totals.total_micros == 25
    assert line_values(october)[-1] == (None, "free_allowance", "2026-10", 0, -40)
    assert october.totals.total_micros == 0
    assert usage_picos(october.lines) == 40_000_000


async def test_the_rest_of_an_allowance_covers_late_events(books: Books) -> None:
    books.clock.jump_wall(10 * 86400)
    await books.allowances.set(books.bob.tenant.id, "2026-10", 50, access=OWNER)
    await books.post(OCTOBER, Tokens(prompt=40, completion=0))
    await books.close("2026-10")
    await books.post(OCTOBER, Tokens(prompt=30, completion=0))

    assert [line[2:] for line in line_values(await books.draft("2026-11"))] == [("2026-10", 30, 30), ("2026-10", 0, -10)]


async def test_a_correction_of_free_usage_refunds_nothing(books: Books) -> None:
    books.clock.jump_wall(10 * 86400)
    await books.allowances.set(books.bob.tenant.id, "2026-10", 50, access=OWNER)
    await books.post(OCTOBER, Tokens(prompt=40, completion=0))
    await books.close("2026-10")
    await books.post(OCTOBER, Tokens(prompt=-30, completion=0), is_correction=True)

    drafted = await books.draft("2026-11")
    assert [line[4] for line in line_values(drafted)] == [-30, 30]
    assert drafted.totals.total_micros == 0


async def test_an_allowance_can_be_replaced_but_not_begin_in_a_closed_month(books: Books) -> None:
    tenant_id = books.bob.tenant.id
    for day in (SEPTEMBER, OCTOBER):
        await books.post(day)
        await books.close(f"{day:%Y-%m}")
    for month in ("2026-09", "2026-10"):
        with pytest.raises(InvoiceClosed, match="2026-10 is closed"):
            await books.allowances.set(tenant_id, month, 1, access=OWNER)
    await books.allowances.set(tenant_id, "2026-11", 1, access=OWNER)
    await books.allowances.set(tenant_id, "2026-11", 2, access=OWNER)
    assert [(row.first_month, row.monthly_micros) for row in await books.allowances.list(tenant_id, access=OWNER)] == [
        ("2026-11", 2)
    ]
    for month, micros, field in (
        ("2026-12", -1, "monthly_micros"),
        ("2026-13", 1, "first_month"),
        ("december", 1, "first_month"),
    ):
        with pytest.raises(InvalidValue, match=field):
            await books.allowances.set(tenant_id, month, micros, access=OWNER)


async def test_an_allowance_of_zero_ends_the_previous_one(books: Books) -> None:
    for month, micros in (("2026-09", 10), ("2026-10", 0)):
        await books.allowances.set(books.bob.tenant.id, month, micros, access=OWNER)
    subtotals = []
    for day in (SEPTEMBER, OCTOBER):
        cost_picos = await books.post(day)
        subtotals.append((await books.close(f"{day:%Y-%m}")).totals.subtotal_micros - cost_picos // 10**6)
    assert subtotals == [-10, 0]


async def test_an_allowance_belongs_to_one_tenant_and_replaces_that_of_the_same_month(books: Books) -> None:
    bob, charlie = books.bob.tenant.id, books.cast.charlie.tenant.id
    await books.post(OCTOBER, person=books.cast.charlie)
    await books.close("2026-10", books.cast.charlie)
    await books.draft("2026-10")
    for tenant_id, month, micros in (
        (charlie, "2026-11", 7), (bob, "2026-12", 3), (bob, "2026-11", 1), (bob, "2026-10", 4), (bob, "2026-11", 2)
    ):  # fmt: skip
        await books.allowances.set(tenant_id, month, micros, access=OWNER)
    bobs, charlies = [await books.allowances.list(tenant_id, access=OWNER) for tenant_id in (bob, charlie)]
    assert [(row.first_month, row.monthly_micros) for row in bobs] == [("2026-10", 4), ("2026-11", 2), ("2026-12", 3)]
    assert [(row.first_month, row.monthly_micros) for row in charlies] == [("2026-11", 7)]
    assert [allowance_in(bobs, month) for month in ("2026-09", "2026-10", "2026-11", "2027-01")] == [0, 4, 2, 3]


async def test_a_manager_reads_invoices_and_allowances_and_cannot_change_them(books: Books) -> None:
    tenant_id = books.bob.tenant.id
    drafted = await books.draft("2026-10")
    manager, viewer = (
        Access(role=Role.MEMBER, actor=SYSTEM, tenants={tenant_id: role}) for role in (TenantRole.MANAGER, TenantRole.VIEWER)
    )
    assert (await books.invoices.list_for_tenant(tenant_id, access=manager)).data
    assert await books.allowances.list(tenant_id, access=manager) == []
    for refused in (
        books.invoices.draft(tenant_id, "2026-10", access=manager),
        books.invoices.close(drafted.head.id, access=manager),
        books.invoices.discard(drafted.head.id, access=manager),
        books.allowances.set(tenant_id, "2026-10", 1, access=manager),
        books.invoices.list_for_tenant(tenant_id, access=viewer),
        books.allowances.list(tenant_id, access=viewer),
    ):
        with pytest.raises(RoleNotAllowed):
            await refused


async def test_costs_in_two_currencies_cannot_be_closed(books: Books) -> None:
    await books.post(OCTOBER)
    await books.post(OCTOBER, price=None, currency="USD")  # costs nothing in any currency
    assert (await books.draft("2026-10")).currency == "EUR"
    await books.post(OCTOBER, currency="USD")
    with pytest.raises(CurrenciesMixed, match="EUR and USD"):
        await books.close("2026-10")


async def test_a_draft_that_cannot_be_computed_is_listed_with_its_problem(books: Books) -> None:
    await books.post(SEPTEMBER)
    closed = await books.close("2026-09")
    draft = await books.draft("2026-10")
    for currency in ("EUR", "USD"):
        await books.post(OCTOBER, currency=currency)
    listed = (await books.invoices.list_for_tenant(books.bob.tenant.id, access=OWNER)).data
    assert [(each.head.id, each.lines == (), "EUR and USD" in (each.problem or "")) for each in listed] == [
        (draft.head.id, True, True),
        (closed.head.id, False, False),
    ]
    assert (listed[0].buyer["name"], listed[0].totals.total_micros, listed[0].totals.due_micros) == ("bob", 0, 0)
    with pytest.raises(CurrenciesMixed, match="EUR and USD"):
        await books.invoices.get(draft.head.id, access=OWNER)


async def test_lines_keep_costs_beyond_64_bits(books: Books) -> None:
    dear = await add_price(books.database, prompt=10**12)
    for _ in range(3):
        await books.post(OCTOBER, Tokens(prompt=9_000_000, completion=0), price=dear)

    closed = await books.close("2026-10")
    assert closed.lines[0].exact_picos == 27 * 10**18 > 2**63
    assert (await books.invoices.get(closed.head.id, access=OWNER)) == closed
    async with books.database.reading() as connection:
        assert (await connection.execute(select(invoice_lines.c.exact_picos))).scalar_one() == str(27 * 10**18)


async def test_events_of_another_tenant_are_not_on_an_invoice(books: Books) -> None:
    await books.post(OCTOBER, person=books.cast.charlie)
    assert (await books.draft("2026-10")).lines == ()


async def test_lists_show_drafts_and_closed_invoices_newest_first(books: Books) -> None:
    await books.post(OCTOBER)
    closed = await books.close("2026-10")
    drafted = await books.draft("2026-11")
    await books.draft("2026-11", books.cast.charlie)

    page = await books.invoices.list_for_tenant(books.bob.tenant.id, 1, access=OWNER)
    rest = await books.invoices.list_for_tenant(books.bob.tenant.id, 1, page.next_cursor, access=OWNER)
    assert [*page.data, *rest.data] == [drafted, closed]
    assert len((await books.invoices.list(month="2026-11", access=OWNER)).data) == 2
    assert [head.id for head in (await books.invoices.list(state="closed", access=OWNER)).data] == [closed.head.id]


async def test_discarding_a_draft_keeps_all_others(books: Books) -> None:
    unwanted, *kept = [await books.draft(*of) for of in (("2026-10",), ("2026-11",), ("2026-10", books.cast.charlie))]
    await books.invoices.discard(unwanted.head.id, access=OWNER)

    left = (await books.invoices.list(access=OWNER)).data
    assert {head.id for head in left} == {invoice.head.id for invoice in kept}


async def test_paging_through_all_invoices_returns_each_once(books: Books) -> None:
    people = (books.bob, books.cast.charlie)
    drafts = [(await books.draft(month, person)).head for month in ("2026-10", "2026-11") for person in people]
    found: list[InvoiceHead] = []
    cursor = None
    for _ in drafts:
        page = await books.invoices.list(1, cursor, access=OWNER)
        found, cursor = [*found, *page.data], page.next_cursor
    assert (found, cursor) == (sorted(drafts, key=lambda head: (head.month, head.id), reverse=True), None)


async def test_a_new_draft_has_a_total_of_zero_in_its_tenants_currency(books: Books) -> None:
    await change_tenant(Tenants(books.database, books.clock), books.bob, currency="CHF")
    head = (await books.draft("2026-10")).head
    assert (head.currency, head.total_micros, head.tax_micros) == ("CHF", 0, 0)


async def test_without_a_seller_there_is_no_tax(books: Books) -> None:
    await books.post(OCTOBER, Tokens(prompt=10**12, completion=0))
    totals = (await books.close("2026-10")).totals
    assert totals.tax_micros == 0 < totals.subtotal_micros == totals.due_micros


async def test_the_current_month_can_be_drafted_as_billable_only_with_usage(books: Books) -> None:
    bob = books.bob.tenant.id
    with pytest.raises(NothingToBill):
        await books.invoices.draft(bob, "2026-11", only="billable", access=OWNER)
    await books.post(NOVEMBER)
    with pytest.raises(MonthNotOver):
        await books.invoices.draft(bob, "2026-11", only="closable", access=OWNER)
    assert (await books.invoices.draft(bob, "2026-11", only="billable", access=OWNER)).is_draft


async def test_allowances_the_seller_and_closing_are_in_the_audit_log(books: Books) -> None:
    with acting(Actor(kind="member", name="alice@example.com")):
        await books.allowances.set(books.bob.tenant.id, "2026-10", 5, access=OWNER)
        await ApplianceRecords(books.database, books.clock).put(SELLER, Seller(name="Box AG").to_record())
        await books.post(OCTOBER)
        await books.close("2026-10")
    async with books.database.reading() as connection:
        rows = (await connection.execute(select(audit_log).order_by(audit_log.c.id))).mappings().all()
    ours = [row for row in rows if row["actor_name"] == "alice@example.com"]
    assert [row["action"] for row in ours] == ["allowance.set", "seller.change", "invoice.draft", "invoice.close"]
    assert [row["target_kind"] for row in ours] == ["tenant", "appliance", "invoice", "invoice"]
    assert '"number":"2026-0001"' in ours[-1]["after"].replace(" ", "")


async def test_the_audit_entry_of_an_allowance_has_its_old_and_new_amount(books: Books) -> None:
    bob = books.bob.tenant.id
    for month, micros in (("2026-11", 5), ("2026-11", 7), ("2026-12", 7)):
        await books.allowances.set(bob, month, micros, access=OWNER)
    log = await AuditLog(books.database, books.clock).page(3, access=OWNER)
    assert {(entry.target_id, entry.tenant_id) for entry in log.data} == {(bob, bob)}
    new = [
        {"first_month": month, "monthly_micros": micros, "tenant_id": bob} for month, micros in (("2026-11", 5), ("2026-12", 7))
    ]
    nothing = dict.fromkeys(new[0])
    assert [(json.loads(entry.before or ""), json.loads(entry.after or "")) for entry in log.data[::-1]] == [
        (nothing, new[0]), ({"monthly_micros": 5}, {"monthly_micros": 7}), (nothing, new[1])
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"name": ""}, "name"),
        ({"name": "x", "address": "one line"}, "address"),
        ({"name": "x", "bank": ["a\nb"]}, "bank"),
        ({"name": "x", "tax_basis_points": 10_001}, "tax_basis_points"),
        ({"name": "x", "tax_basis_points": -1}, "tax_basis_points"),
        ({"name": "x", "payment_terms_days": -1}, "payment_terms_days"),
        ({"name": "x", "payment_terms_days": 366}, "payment_terms_days"),
        ({"name": "x", "address": ["line"] * 9}, "address"),
        ({"name": "x", "email": "\x00"}, "email"),
    ],
    ids=str,
)
def test_an_invalid_field_of_the_seller_is_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(GatehouseError) as refused:
        Seller(**fields)  # type: ignore[arg-type]
    assert refused.value.param == param


def test_the_largest_values_of_the_seller_are_accepted() -> None:
    most = Seller(name="x", address=(" line ",) * 8, payment_terms_days=365, tax_basis_points=10_000)
    assert most.address == ("line",) * 8
    assert Seller(name="x", payment_terms_days=0).bank == ()


def test_the_worked_example_in_the_documentation_matches_the_code() -> None:
    def used(prompt: int, cached: int, completion: int, price: int) -> EventSums:
        prices = (price, 15_000, 600_000, 0)
        cost = (prompt - cached) * price + cached * 15_000 + completion * 600_000
        return EventSums(
            month="2026-10", model="demo", currency="EUR", is_correction=False, unit_prices=prices, requests=1,
            kind_requests=(1, 1, 1, 0),
            prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion, rejected_tokens=0, cost_picos=cost,
        )  # fmt: skip

    lines = usage_lines([used(123_456_789, 98_765_432, 4_567_891, 150_000), used(80_000_001, 0, 2_000_003, 120_000)], "2026-10")
    lines += allowance_lines(lines, {"2026-10": MonthAllowance(monthly_micros=5_000_000)})
    totals = totals_of(lines, tax_basis_points=1900, currency="EUR")
    text = (Path(__file__).resolve().parents[2] / "docs" / "billing.md").read_text("utf-8").replace("−", "-")

    assert usage_picos(lines) == 18_725_921_550_000
    for line in lines:
        assert f"| {line.exact_picos:,} | {format_micros(line.rounded_micros)} |" in text
    assert [totals.subtotal_micros, totals.rounding_micros, totals.tax_micros, totals.due_micros] == [
        13_725_921, 4_079, 2_610_000, 16_340_000,
    ]  # fmt: skip
    assert "| 13.725921 |" in text
    assert ABORT_POLICY.partition(": ")[2].casefold() in " ".join(text.casefold().split())


async def test_lines_do_not_depend_on_which_events_were_summed_ahead(books: Books) -> None:
    for prompt, cached, completion in ((10, 10, 0), (7, 3, 2), (5, 0, 0), (0, 0, 4)):
        await books.post(OCTOBER, Tokens(prompt=prompt, cached=cached, completion=completion))
    async with books.database.reading() as connection:
        whole = await books.sums(connection, None, 4)
        assert [line.requests for line in usage_lines(whole, "2026-10")] == [2, 2, 2]
        for posting in range(5):
            ahead = await books.sums(connection, None, posting)
            since = await books.sums(connection, posting, 4)
            assert usage_lines([*ahead, *since], "2026-10") == usage_lines(whole, "2026-10")


async def test_the_currencies_of_an_invoice_do_not_depend_on_which_events_were_summed_ahead(books: Books) -> None:
    await books.post(OCTOBER)
    for tokens in (Tokens(prompt=3, completion=0), Tokens(prompt=0, completion=-1)):  # together nothing
        await books.post(OCTOBER, tokens, is_correction=True, currency="USD")
    async with books.database.reading() as connection:
        whole = await books.sums(connection, None, 3)
        ahead = await books.sums(connection, None, 2)
        since = await books.sums(connection, 2, 3)
    assert usage_lines([*ahead, *since], "2026-10") == usage_lines(whole, "2026-10")
