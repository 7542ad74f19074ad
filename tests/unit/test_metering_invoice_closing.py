"""Drafting and closing invoices: a refusal stores nothing, and exactly what was seen is closed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

import pytest
import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.db import Database
from appliance.base.errors import (
    CurrenciesMixed,
    EarlierMonthOpen,
    InvoiceInconsistent,
    MonthOutOfOrder,
    NothingToBill,
    TotalChanged,
)
from appliance.metering.appliance_records import SELLER, ApplianceRecords
from appliance.metering.invoicing import portions
from appliance.metering.invoicing.computation import read_sums_ahead
from appliance.metering.invoicing.seller import Seller
from appliance.tenancy.audit import AuditFilter, AuditLog
from appliance.tenancy.principals import TenantChanges
from appliance.tenancy.tenants import Tenants
from tests.support.billing import Tokens, add_price
from tests.support.cast import OWNER, Cast
from tests.support.clock import FakeClock
from tests.support.invoice_books import Books
from tests.support.tampering import tamper

SEPTEMBER, OCTOBER, NOVEMBER = date(2026, 9, 10), date(2026, 10, 15), date(2026, 11, 3)


@pytest.fixture
async def books(database: Database, clock: FakeClock, cast: Cast) -> Books:
    return Books(database, clock, cast, await add_price(database))


@pytest.mark.parametrize("only", [None, "billable", "closable"])
async def test_a_month_in_two_currencies_gets_no_draft(books: Books, only: str | None) -> None:
    for currency in ("EUR", "USD"):
        await books.post(OCTOBER, currency=currency)
    with pytest.raises(CurrenciesMixed, match="EUR and USD"):
        await books.invoices.draft(books.bob.tenant.id, "2026-10", only=only, access=OWNER)
    assert (await books.invoices.list(access=OWNER)).data == []


async def test_the_empty_drafts_that_closing_removes_are_in_the_audit_log(books: Books) -> None:
    passed = [await books.draft(month) for month in ("2026-08", "2026-09")]
    await books.draft("2026-09", books.cast.charlie)
    await books.post(OCTOBER)
    await books.close("2026-10")

    log = AuditLog(books.database, books.clock)
    entries = (await log.page(filters=AuditFilter(actions=["invoice.discard"]), access=OWNER)).data
    assert [(entry.target_kind, entry.target_id, entry.tenant_id, entry.before) for entry in reversed(entries)] == [
        ("invoice", draft.head.id, books.bob.tenant.id, f'{{"month":"{draft.head.month}"}}') for draft in passed
    ]


async def test_an_event_posted_after_the_total_was_seen_prevents_the_closing(books: Books) -> None:
    await books.post(OCTOBER, Tokens(prompt=1_000_000, completion=0))
    seen = await books.draft("2026-10")
    await books.post(OCTOBER, Tokens(prompt=7, completion=0))

    with pytest.raises(TotalChanged, match=r"total of 2026-10 is 1.000007 EUR, not 1.000000 EUR"):
        await books.invoices.close(seen.head.id, expected_total_micros=seen.totals.total_micros, access=OWNER)
    closed = await books.invoices.close(seen.head.id, expected_total_micros=1_000_007, access=OWNER)
    assert (closed.totals.total_micros, closed.head.number) == (1_000_007, "2026-0001")


async def test_an_event_posted_while_the_invoice_is_closed_prevents_the_closing(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    await books.post(OCTOBER, Tokens(prompt=10, completion=0))
    seen = await books.draft("2026-10")

    async def posted_meanwhile(connection: AsyncConnection, month: str, tenant_ids: Sequence[str]) -> object:
        ahead = await read_sums_ahead(connection, month, tenant_ids)
        await books.post(OCTOBER, Tokens(prompt=7, completion=0))
        return ahead

    monkeypatch.setattr(portions, "read_sums_ahead", posted_meanwhile)
    with pytest.raises(TotalChanged, match=r"is 0.000017 EUR, not 0.000010 EUR"):
        await books.invoices.close(seen.head.id, expected_total_micros=10, access=OWNER)


async def test_tax_added_after_the_total_was_seen_prevents_the_closing(books: Books) -> None:
    await books.post(OCTOBER, Tokens(prompt=1_000_000, completion=0))
    seen = await books.draft("2026-10")
    seller = Seller(name="Box AG", tax_basis_points=1900).to_record()
    await ApplianceRecords(books.database, books.clock).put(SELLER, seller)

    with pytest.raises(TotalChanged, match=r"is 1.190000 EUR, not 1.000000 EUR"):
        await books.invoices.close(seen.head.id, expected_total_micros=seen.totals.total_micros, access=OWNER)


async def test_an_amount_in_another_currency_prevents_the_closing(books: Books) -> None:
    await books.post(OCTOBER, Tokens(prompt=1_000_000, completion=0), currency="USD")
    seen = await books.draft("2026-10")
    total = seen.totals.total_micros
    with pytest.raises(TotalChanged, match=r"total of 2026-10 is 1.000000 USD, not 1.000000 EUR") as refused:
        await books.invoices.close(seen.head.id, expected_total_micros=total, expected_currency="EUR", access=OWNER)
    assert refused.value.param == "expected_currency"
    with pytest.raises(TotalChanged, match=r"is 1.000000 USD, not 1.000000 EUR"):
        await books.invoices.close(seen.head.id, expected_currency="EUR", access=OWNER)
    closed = await books.invoices.close(seen.head.id, expected_total_micros=total, expected_currency="USD", access=OWNER)
    assert closed.head.currency == "USD"


async def test_a_draft_that_cannot_be_computed_is_listed_in_its_tenants_currency(books: Books) -> None:
    bob = books.bob.tenant.id
    await books.draft("2026-10")
    await Tenants(books.database, books.clock).update(bob, TenantChanges(currency="CHF"), access=OWNER)
    for currency in ("EUR", "USD"):
        await books.post(OCTOBER, currency=currency)
    (draft,) = (await books.invoices.list_for_tenant(bob, access=OWNER)).data
    assert (draft.currency, draft.totals.total_micros) == ("CHF", 0)


async def test_an_empty_month_after_one_that_is_not_billed_is_not_closable(books: Books) -> None:
    bob = books.bob.tenant.id
    await books.post(SEPTEMBER)
    with pytest.raises(EarlierMonthOpen, match="2026-09 must be closed before 2026-10"):
        await books.invoices.draft(bob, "2026-10", only="closable", access=OWNER)
    with pytest.raises(NothingToBill):
        await books.invoices.draft(bob, "2026-10", only="billable", access=OWNER)
    await books.close("2026-09")
    with pytest.raises(NothingToBill):
        await books.invoices.draft(bob, "2026-10", only="closable", access=OWNER)


async def test_only_an_invoice_with_an_amount_to_pay_has_a_due_date(books: Books) -> None:
    books.clock.jump_wall(10 * 86400)
    million = Tokens(prompt=1_000_000, completion=0)
    await books.post(SEPTEMBER, million)
    to_pay = await books.close("2026-09")
    await books.post(SEPTEMBER, Tokens(prompt=-400_000, completion=0), is_correction=True)
    credit_note, empty = await books.close("2026-10"), await books.close("2026-11")
    assert (to_pay.due_on, credit_note.due_on, empty.due_on) == (date(2026, 12, 31), None, None)
    assert credit_note.totals.due_micros == -400_000


async def test_a_month_that_contradicts_itself_prevents_the_closing_of_later_months_but_not_their_drafts(books: Books) -> None:
    for day in (SEPTEMBER, OCTOBER):
        await books.post(day)
    await tamper(books.database, "UPDATE usage_events SET cost_picos = cost_picos + 1 WHERE billing_day = '2026-09-10'")
    with (
        structlog.testing.capture_logs() as logs,
        pytest.raises(
            InvoiceInconsistent, match=r"in 2026-09 cost 0.000025000001 EUR, but their tokens .* 0.000025 EUR"
        ) as refused,
    ):
        await books.draft("2026-09")
    logged = {"event": "invoice_inconsistent", "log_level": "error", "tenant_id": books.bob.tenant.id, "month": "2026-09"}
    assert logs == [logged | {"reason": refused.value.message}]
    october = await books.draft("2026-10")

    assert [line.month for line in october.lines] == ["2026-10", "2026-10"]
    assert len((await books.invoices.events(october.head.id, access=OWNER)).data) == 1
    with pytest.raises(MonthOutOfOrder, match="2026-09 must be closed before 2026-10"):
        await books.invoices.close(october.head.id, access=OWNER)
