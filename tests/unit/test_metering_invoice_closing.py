"""Drafting and closing invoices: a refusal stores nothing, and exactly what was seen is closed."""

from __future__ import annotations

from datetime import date

import pytest

from appliance.base.db import Database
from appliance.base.errors import CurrenciesMixed
from appliance.tenancy.access import WHOLE_APPLIANCE
from appliance.tenancy.audit import AuditFilter, AuditLog
from tests.support.billing import add_price
from tests.support.cast import Cast
from tests.support.clock import FakeClock
from tests.support.invoice_books import Books

SEPTEMBER, OCTOBER, NOVEMBER = date(2026, 9, 10), date(2026, 10, 15), date(2026, 11, 3)


@pytest.fixture
async def books(database: Database, clock: FakeClock, cast: Cast) -> Books:
    return Books(database, clock, cast, await add_price(database))


@pytest.mark.parametrize("only", [None, "billable", "closable"])
async def test_a_month_in_two_currencies_gets_no_draft(books: Books, only: str | None) -> None:
    for currency in ("EUR", "USD"):
        await books.post(OCTOBER, currency=currency)
    with pytest.raises(CurrenciesMixed, match="EUR and USD"):
        await books.invoices.draft(books.bob.tenant.id, "2026-10", only=only, access=WHOLE_APPLIANCE)
    assert (await books.invoices.list(access=WHOLE_APPLIANCE)).data == []


async def test_the_empty_drafts_that_closing_removes_are_in_the_audit_log(books: Books) -> None:
    passed = [await books.draft(month) for month in ("2026-08", "2026-09")]
    await books.draft("2026-09", books.cast.charlie)
    await books.post(OCTOBER)
    await books.close("2026-10")

    log = AuditLog(books.database, books.clock)
    entries = (await log.page(filters=AuditFilter(actions=["invoice.discard"]), access=WHOLE_APPLIANCE)).data
    assert [(entry.target_id, entry.tenant_id, entry.before) for entry in reversed(entries)] == [
        (draft.head.id, books.bob.tenant.id, f'{{"month":"{draft.head.month}"}}') for draft in passed
    ]
