"""Months that are drafted and closed by several callers at once, while usage and corrections are posted, in several currencies.

Every posted cost is on exactly one invoice, and JSON, CSV and PDF say what the invoice says.
"""

from __future__ import annotations

import asyncio
import csv
import io
import random
from collections.abc import Sequence
from datetime import date, timedelta

import pytest
from pypdf import PdfReader

from appliance.api.admin.invoice_shapes import invoice_shape
from appliance.base.db import Database
from appliance.base.money import format_micros
from appliance.metering.calendar import BillingCalendar
from appliance.metering.invariants import invoices as invariants
from appliance.metering.invoicing import invoices as service
from appliance.metering.invoicing import months
from appliance.metering.invoicing.csv_file import render_csv
from appliance.metering.invoicing.invoices import Invoices
from appliance.metering.invoicing.lines import usage_picos
from appliance.metering.invoicing.pdf import render_pdf
from appliance.metering.invoicing.rows import Invoice
from appliance.metering.invoicing.wording import decimals_for, format_payment
from appliance.metering.prices import Price
from tests.support.billing import Tokens, add_price, post_event
from tests.support.cast import OWNER, Cast, Person, make_person
from tests.support.clock import FakeClock
from tests.support.ledgers import all_events, euro_invoices

MONTHS, OPEN_MONTH = ("2026-08", "2026-09", "2026-10"), "2026-11"
CURRENCIES = ("EUR", "JPY", "BHD", "EUR", "CLF")  # of one tenant each; with 2, 0, 3 and 4 decimals
EVENTS, PORTION = 20, 2


@pytest.mark.parametrize("seed", [1, 2])
async def test_costs_posted_while_months_are_billed_concurrently_are_on_exactly_one_invoice(
    database: Database, clock: FakeClock, cast: Cast, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    for module in (service, months):
        monkeypatch.setattr(module, "PORTION_TENANTS", PORTION)
    chance = random.Random(seed)
    prices = [None, *[await add_price(database, prompt=chance.randrange(1, 10**9)) for _ in range(3)]]
    people = [await make_person(database, clock, f"tenant {number}") for number in range(len(CURRENCIES))]
    invoices = euro_invoices(database, clock, BillingCalendar("UTC"))
    for person, currency in zip(people, CURRENCIES, strict=True):
        await _post(database, person, currency, prices, chance, cast.epoch_id, is_correction=False)

    ids = [person.tenant.id for person in people]
    async with asyncio.TaskGroup() as tasks:
        for person, currency in zip(people, CURRENCIES, strict=True):
            tasks.create_task(_post_many(database, person, currency, prices, chance, cast.epoch_id))
        for _ in range(2):
            tasks.create_task(_bill(invoices, chance.sample(ids, len(ids)), chance))
    for month in MONTHS:
        async for _ in months.close_month(invoices, ids, month, access=OWNER):
            pass

    events = await all_events(database)
    numbers = []
    for person in people:
        billed = [await invoices.draft(person.tenant.id, OPEN_MONTH, access=OWNER)]
        billed += [one for one in (await invoices.list_for_tenant(person.tenant.id, access=OWNER)).data if not one.is_draft]
        own = [event for event in events if event.tenant_id == person.tenant.id]
        assert sum(usage_picos(invoice.lines) for invoice in billed) == sum(event.cost_picos for event in own)
        covered = [(await invoices.events(one.head.id, 1000, access=OWNER)).data for one in billed]
        assert sorted(event.id for page in covered for event in page) == sorted(event.id for event in own)
        for invoice in billed:
            _check_files(invoice)
        numbers += [invoice.head.number for invoice in billed[1:]]
    assert sorted(filter(None, numbers)) == [f"2026-{count:04d}" for count in range(1, len(numbers) + 1)]
    async with database.reading() as connection:
        assert (await invariants.check(connection)).state == "holds"


async def _bill(invoices: Invoices, tenant_ids: Sequence[str], chance: random.Random) -> None:
    """Draft and close the months of the tenants in order, as one of several callers."""
    for month in MONTHS:
        if chance.random() < 0.5:
            async for _ in months.draft_month(invoices, tenant_ids, month, access=OWNER):
                await asyncio.sleep(0)
        async for _ in months.close_month(invoices, tenant_ids, month, access=OWNER):
            await asyncio.sleep(0)


async def _post_many(
    database: Database, person: Person, currency: str, prices: Sequence[Price | None], chance: random.Random, epoch_id: str
) -> None:
    for _ in range(EVENTS):
        await _post(database, person, currency, prices, chance, epoch_id, is_correction=chance.random() < 0.2)
        await asyncio.sleep(0)


async def _post(
    database: Database,
    person: Person,
    currency: str,
    prices: Sequence[Price | None],
    chance: random.Random,
    epoch_id: str,
    *,
    is_correction: bool,
) -> None:
    sign, prompt = -1 if is_correction else 1, chance.randrange(10**6)
    cached, completion, rejected = chance.randrange(prompt + 1), chance.randrange(10**5), chance.randrange(100)
    tokens = Tokens(prompt=sign * prompt, cached=sign * cached, completion=sign * completion, rejected=sign * rejected)
    day = date.fromisoformat(f"{chance.choice(MONTHS)}-01") + timedelta(days=chance.randrange(28))
    await post_event(
        database, person, day, tokens, epoch_id=epoch_id, price=chance.choice(prices), currency=currency,
        model=chance.choice(["demo", "organization/large-model"]), basis_points=chance.choice([10_000, 8_000, 3_333]),
        batch=not is_correction and chance.random() < 0.3, is_correction=is_correction, note="why" if is_correction else None,
    )  # fmt: skip


def _check_files(invoice: Invoice) -> None:
    """Check that JSON, CSV and PDF have the amounts of the invoice's lines, and its amount to pay."""
    shape = invoice_shape(invoice)
    exact = [line.exact_picos for line in invoice.lines]
    rounded = [line.rounded_micros for line in invoice.lines]
    assert [line.exact_picos for line in shape.lines] == exact
    assert (sum(line.rounded_micros for line in shape.lines), shape.usage_picos) == (shape.subtotal_micros, sum(exact))
    assert shape.due_micros == shape.total_micros + shape.rounding_micros

    rows = list(csv.DictReader(io.StringIO(render_csv(invoice).decode())))
    assert [(int(row["exact_picos"]), int(row["rounded_micros"])) for row in rows] == list(zip(exact, rounded, strict=True))

    text = "\n".join(page.extract_text() for page in PdfReader(io.BytesIO(render_pdf(invoice))).pages)
    decimals = max(decimals_for([*rounded, shape.subtotal_micros]), len(format_payment(0, invoice.currency).split()[0]) - 2)
    for micros in (*rounded, shape.subtotal_micros):
        assert format_micros(micros, decimals=decimals) in text
    assert format_payment(abs(shape.due_micros), invoice.currency) in text
