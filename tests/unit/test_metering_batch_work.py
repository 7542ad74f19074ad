"""Batch work from request to invoice: scheduled last, priced at the batch percentage, and invoiced on lines of its own."""

from __future__ import annotations

import csv
import dataclasses
import io
from datetime import date
from typing import Any

import msgspec
import pytest
from pypdf import PdfReader
from sqlalchemy import update

from appliance.api.admin.invoice_shapes import invoice_shape
from appliance.base import tables
from appliance.base.db import Database
from appliance.base.errors import BudgetExceeded, InvalidValue
from appliance.metering.calendar import BillingCalendar
from appliance.metering.invariants.check import check_ledger
from appliance.metering.invoicing.csv_file import render_csv
from appliance.metering.invoicing.lines import InvoiceLine
from appliance.metering.invoicing.pdf import render_pdf
from appliance.metering.invoicing.wording import ABORT_POLICY, line_name
from appliance.metering.ledger.corrections import Correction
from appliance.metering.ledger.epochs import begin_epoch
from appliance.metering.ledger.records import Usage, UsageEvent
from appliance.metering.limits.admission_request import is_batch_work
from appliance.metering.past_requests import PastRequests
from appliance.metering.prices import Price
from appliance.tenancy.principals import Limits
from engine.protocol import Priority
from tests.support import factories
from tests.support.billing import Tokens, add_price, post_event
from tests.support.cast import OWNER, Cast, Person
from tests.support.clock import FakeClock
from tests.support.factories import admission_request
from tests.support.generations import MODEL, Serving, text_of
from tests.support.ledgers import all_events, euro_invoices, euro_prices, running_ledger, settle, utc_corrections, utc_recover
from tests.support.tampering import disable_triggers

TEXT = "the quick brown fox"
OCTOBER = date(2026, 10, 15)


async def add_price_of(database: Database, clock: FakeClock, model: str = MODEL, **options: Any) -> Price:
    """Add a price of 1,000 micro-units per million prompt tokens and twice that for output; batch work costs half."""
    terms = {"prompt": 1000, "cached_prompt": 100, "completion": 2000, "batch_percent": 50, **options}
    return await euro_prices(database, clock).add(model=model, currency="EUR", **terms)


@pytest.mark.parametrize(("tier", "batch"), [("auto", False), ("default", False), ("flex", True)])
def test_only_the_service_tier_flex_is_batch_work(tier: str, batch: bool) -> None:
    assert is_batch_work(tier) is batch


@pytest.mark.parametrize("tier", ["priority", "scale", "Flex", "", None, 1])
def test_an_unknown_service_tier_is_refused_and_the_known_ones_are_named(tier: object) -> None:
    with pytest.raises(InvalidValue, match="service_tier must be one of auto, default, flex") as refused:
        is_batch_work(tier)
    assert refused.value.param == "service_tier"


async def test_batch_work_runs_in_the_batch_class_of_any_tier_at_the_batch_price(
    serving: Serving, database: Database, clock: FakeClock, cast: Cast
) -> None:
    await add_price_of(database, clock)
    generations = [await serving.start(cast.bob, TEXT, batch=batch) for batch in (False, True)]
    for generation in generations:
        assert await text_of(generation) == TEXT
        await generation.outcome
    usual, flex = [await serving.event(generation) for generation in generations]
    submitted = {request.request_id: request.priority for frame in serving.engine.frames for request in frame.submit}

    assert [submitted[generation.request_id] for generation in generations] == [Priority.STANDARD, Priority.BATCH]
    assert (usual.batch, flex.batch) == (False, True)
    assert (usual.price_basis_points, flex.price_basis_points) == (10_000, 5000)
    assert usual.cost_picos == 2 * flex.cost_picos > 0
    for generation, batch in zip(generations, (False, True), strict=True):
        assert generation.live.batch is batch
        assert (await PastRequests(database).get(generation.request_id, access=OWNER)).batch is batch


async def test_discounts_of_tier_and_batch_work_multiply(
    serving: Serving, database: Database, clock: FakeClock, cast: Cast
) -> None:
    await add_price_of(database, clock, tier_percents={"standard": 80})
    generation = await serving.start(cast.bob, TEXT, batch=True)
    await generation.outcome
    assert (await serving.event(generation)).price_basis_points == 4000


async def test_a_budget_too_small_for_a_request_admits_it_as_batch_work(
    serving: Serving, database: Database, clock: FakeClock
) -> None:
    price = await add_price_of(database, clock, prompt=1_000_000, completion=1_000_000)
    who = factories.principal(Limits(monthly_budget=120))
    request = admission_request(who, 100, 100, model=MODEL, price=price)

    with pytest.raises(BudgetExceeded):
        await serving.admission.admit(request)
    reservation = await serving.admission.admit(msgspec.structs.replace(request, batch=True))
    assert reservation.basis_points == 5000
    reservation.void()


async def test_recovery_and_correction_keep_the_batch_mark_and_its_price(
    database: Database, database_url: str, clock: FakeClock, cast: Cast
) -> None:
    price = await add_price_of(database, clock, "demo")
    entry = factories.pending(cast.bob, price=price, price_basis_points=5000, batch=True)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await ledger.open(entry)
        ledger.checkpoint({entry.request_id: Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=5, rejected_tokens=0)})
    clock.advance(60)
    assert await utc_recover(database, clock, await begin_epoch(database, clock, "next")) == 1
    (event,) = await all_events(database)
    made = await utc_corrections(database, clock).add(event.id, Correction(note="ours", completion_tokens=-2))

    assert (event.status, event.batch, event.cost_picos) == ("recovered", True, 6 * 500 + 4 * 50 + 5 * 1000)
    assert (made.batch, made.price_basis_points, made.cost_picos) == (True, 5000, -2 * 1000)
    assert await broken_invariants(database_url) == set()


async def broken_invariants(url: str) -> set[str]:
    return {
        finding.name for finding in await check_ledger(url, running=False, time_zone="UTC") if finding.state == "broken"
    } - {"kept"}


@pytest.fixture
async def event(database: Database, clock: FakeClock, cast: Cast) -> UsageEvent:
    """A posted event of Bob's batch work, at the batch share of its price."""
    price = await add_price_of(database, clock, "demo")
    entry = factories.pending(cast.bob, price=price, price_basis_points=5000, batch=True)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await ledger.open(entry)
        return await settle(ledger, factories.posted(entry.request_id))


@pytest.mark.parametrize("also_the_request", [False, True])
async def test_the_ledger_check_finds_other_work_at_the_batch_price(
    also_the_request: bool, database: Database, database_url: str, event: UsageEvent
) -> None:
    assert await broken_invariants(database_url) == set()
    async with database.writing() as connection:
        await disable_triggers(connection)
        await connection.execute(update(tables.usage_events).values(batch=False))
        if also_the_request:
            await connection.execute(update(tables.requests).values(batch=False))
    assert await broken_invariants(database_url) == ({"price"} if also_the_request else {"price", "requests"})


async def test_the_ledger_check_finds_batch_work_at_the_full_price(
    database: Database, database_url: str, event: UsageEvent
) -> None:
    whole = {"price_basis_points": 10_000, "cost_picos": 2 * event.cost_picos}
    async with database.writing() as connection:
        await disable_triggers(connection)
        await connection.execute(update(tables.usage_events).values(**whole))
    assert "price" in await broken_invariants(database_url)


class Books:
    """Bob's usage of October: ordinary work, batch work at half price, and batch work at a price without a batch discount."""

    def __init__(self, database: Database, clock: FakeClock, cast: Cast) -> None:
        self._database, self._epoch_id = database, cast.epoch_id
        self.bob: Person = cast.bob
        self.invoices = euro_invoices(database, clock, BillingCalendar("UTC"))

    async def post(self, tokens: Tokens, **options: Any) -> int:
        return await post_event(self._database, self.bob, OCTOBER, tokens, epoch_id=self._epoch_id, **options)


@pytest.fixture
async def books(database: Database, clock: FakeClock, cast: Cast) -> Books:
    made = Books(database, clock, cast)
    price, same = await add_price(database), dataclasses.replace(await add_price(database), batch_percent=100)
    await made.post(Tokens(prompt=100, cached=40, completion=7), price=price)
    await made.post(Tokens(prompt=10, completion=1), price=price, basis_points=5000, batch=True)
    await made.post(Tokens(prompt=3, completion=0), price=same, batch=True)
    return made


async def test_batch_work_has_invoice_lines_of_its_own_even_at_the_same_price(books: Books) -> None:
    draft = await books.invoices.draft(books.bob.tenant.id, "2026-10", access=OWNER)
    closed = await books.invoices.close(draft.head.id, access=OWNER)

    assert [(line.batch, line.kind, line.unit_price, line.tokens, line.requests) for line in draft.lines] == [
        (False, "prompt", 1_000_000, 60, 1),
        (False, "cached_prompt", 100_000, 40, 1),
        (False, "completion", 3_000_000, 7, 1),
        (True, "prompt", 500_000, 10, 1),
        (True, "prompt", 1_000_000, 3, 1),
        (True, "completion", 1_500_000, 1, 1),
    ]
    assert closed.lines == draft.lines
    assert (await books.invoices.get(draft.head.id, access=OWNER)).lines == draft.lines


async def test_a_correction_of_batch_work_is_invoiced_as_an_ordinary_adjustment(books: Books) -> None:
    before = await books.invoices.draft(books.bob.tenant.id, "2026-10", access=OWNER)
    price = await add_price(books._database)
    await books.post(Tokens(prompt=-1, completion=0), price=price, basis_points=5000, batch=True, is_correction=True)
    after = await books.invoices.get(before.head.id, access=OWNER)

    assert list(after.lines[:-1]) == list(before.lines)
    assert (after.lines[-1].kind, after.lines[-1].batch, after.lines[-1].exact_picos) == ("adjustment", False, -500_000)


async def test_invoice_files_mark_batch_work_and_state_how_aborted_work_is_billed(books: Books) -> None:
    draft = await books.invoices.draft(books.bob.tenant.id, "2026-10", access=OWNER)
    rows = list(csv.DictReader(io.StringIO(render_csv(draft).decode())))
    shape = invoice_shape(draft)

    assert [row["batch"] for row in rows] == ["no"] * 3 + ["yes"] * 3
    assert len(rows) == len(draft.lines), "one row per line and no others"
    assert [line.batch for line in shape.lines] == [line.batch for line in draft.lines]
    assert shape.abort_policy == ABORT_POLICY
    (page,) = [page.extract_text() for page in PdfReader(io.BytesIO(render_pdf(draft))).pages]
    assert page.count("Prompt tokens, batch") == 2
    assert line_name(draft.lines[-1]) in page


def test_the_name_of_an_invoice_line_marks_batch_work() -> None:
    usual = InvoiceLine(
        model="demo", kind="completion", month="2026-10", unit_price=1, tokens=1, requests=1, exact_picos=1, rounded_micros=0
    )
    assert line_name(dataclasses.replace(usual, batch=True)) == f"{line_name(usual)}, batch"
