"""Invoices over events that the ledger itself wrote: posted, voided, pending, recovered and corrected ones."""

from __future__ import annotations

import dataclasses
from datetime import UTC, date, datetime, timedelta

import pytest

from appliance.base.db import Database
from appliance.base.errors import CurrenciesMixed
from appliance.metering.calendar import BillingCalendar
from appliance.metering.invariants import invoices as invoice_invariant
from appliance.metering.invoicing.lines import usage_picos
from appliance.metering.invoicing.sums import Coverage, _parts, _sums_query, read_event_sums
from appliance.metering.ledger.corrections import Correction
from appliance.metering.ledger.epochs import begin_epoch
from appliance.metering.ledger.records import Settlement, Usage
from tests.support.billing import Tokens, add_price, post_event
from tests.support.cast import OWNER, Cast
from tests.support.clock import FakeClock
from tests.support.factories import pending, posted, voided
from tests.support.ledgers import all_events, euro_invoices, running_ledger, utc_corrections, utc_recover
from tests.support.query_plans import query_plan
from tests.support.tampering import tamper

POSTED_SINCE = "SEARCH usage_events USING INDEX ix_usage_events_tenant_id_posting (tenant_id=? AND posting>? AND posting<?)"
OCTOBER = datetime(2026, 10, 31, 23, 59, tzinfo=UTC)


async def test_posted_events_are_billed_and_voided_or_pending_ones_are_not(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    price = await add_price(database)
    entries = [pending(cast.bob, admitted_at=OCTOBER, price=price, price_basis_points=share) for share in (10_000, 5_000)]
    refused, open_ = (pending(cast.bob, admitted_at=OCTOBER, price=price) for _ in range(2))
    usage = Usage(prompt_tokens=100, cached_tokens=30, completion_tokens=7, rejected_tokens=4)
    invoices = euro_invoices(database, clock, BillingCalendar("UTC"))
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        for entry in (*entries, refused, open_):
            await ledger.open(entry)
        for entry in entries:
            settlement = Settlement(request_id=entry.request_id, status="posted", finish_reason="stop", usage=usage)
            await ledger.settle(settlement)
        await ledger.settle(voided(refused.request_id))
        drafted = await invoices.draft(cast.bob.tenant.id, "2026-10", access=OWNER)

        assert {line.requests for line in drafted.lines if line.kind != "rejected_draft"} == {1}
        lines = [(line.kind, line.unit_price, line.tokens) for line in drafted.lines]
        assert lines == [
            ("prompt", 500_000, 70),
            ("prompt", 1_000_000, 70),
            ("cached_prompt", 50_000, 30),
            ("cached_prompt", 100_000, 30),
            ("completion", 1_500_000, 7),
            ("completion", 3_000_000, 7),
            ("rejected_draft", 0, 8),
        ]
        events = await all_events(database)
        assert usage_picos(drafted.lines) == sum(event.cost_picos for event in events)
        closed = await invoices.close(drafted.head.id, access=OWNER)
        assert closed.head.through_posting == 3
        await ledger.settle(posted(open_.request_id, prompt=10, completion=5))

    (late,) = (await invoices.draft(cast.bob.tenant.id, "2026-11", access=OWNER)).lines
    assert (late.kind, late.month, late.tokens, late.exact_picos) == ("adjustment", "2026-10", 15, 25 * 10**6)


async def test_recovered_and_corrected_events_are_on_the_next_invoice(database: Database, clock: FakeClock, cast: Cast) -> None:
    price = await add_price(database)
    entry, lost = (pending(cast.bob, admitted_at=OCTOBER, price=price) for _ in range(2))
    invoices = euro_invoices(database, clock, BillingCalendar("UTC"))
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await ledger.open(entry)
        await ledger.open(lost)
        await ledger.settle(posted(entry.request_id, prompt=10, completion=0))
        ledger.checkpoint({lost.request_id: Usage(prompt_tokens=10, cached_tokens=0, completion_tokens=2)})
        await ledger.settle(posted(entry.request_id, prompt=10, completion=0))  # with it the checkpoint is written
    closed = await invoices.close((await invoices.draft(cast.bob.tenant.id, "2026-10", access=OWNER)).head.id, access=OWNER)
    await utc_recover(database, clock, await begin_epoch(database, clock, "after the crash"))
    billed = (await all_events(database))[0]
    corrections = utc_corrections(database, clock)
    await corrections.add(billed.id, Correction(note="was not wanted", prompt_tokens=-4))
    await corrections.add(billed.id, Correction(note="our apologies", cost_picos=-5))
    clock.jump_wall(timedelta(days=30).total_seconds())

    following = await invoices.close((await invoices.draft(cast.bob.tenant.id, "2026-11", access=OWNER)).head.id, access=OWNER)
    costs = [event.cost_picos for event in await all_events(database)]
    assert sum(costs) == usage_picos(closed.lines) + usage_picos(following.lines)
    (line,) = following.lines
    assert (line.month, line.requests, line.exact_picos) == ("2026-10", 1, 16 * 10**6 - 4 * 10**6 - 5)
    assert dataclasses.asdict(await invoices.get(closed.head.id, access=OWNER)) == dataclasses.asdict(closed)


async def test_events_posted_since_the_sum_ahead_are_summed_separately(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    months = [OCTOBER - timedelta(days=60), OCTOBER, OCTOBER + timedelta(days=1)]
    people = (cast.bob, cast.charlie)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        for number in range(18):
            entry = pending(people[number % 2], admitted_at=months[number % 3])
            await ledger.open(entry)
            await ledger.settle(posted(entry.request_id, prompt=2**number, completion=0))
    events = [each for each in await all_events(database) if each.tenant_id == cast.bob.tenant.id]
    for ahead in range(19):
        async with database.reading() as connection:
            bob, previous = cast.bob.tenant.id, Coverage("2026-10", ahead)
            since = (await read_event_sums(connection, {bob: previous}, Coverage("2026-10", 17)))[bob]
        assert sum(each.prompt_tokens for each in since) == sum(
            event.prompt_tokens
            for event in events
            if event.billing_day.month <= 10 and event.posting is not None and ahead < event.posting <= 17
        )


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_events_posted_since_the_sum_ahead_are_found_by_an_index_on_postings(database: Database) -> None:
    (since,) = _parts({"a tenant": Coverage("2026-11", 900)}, Coverage("2026-11", 1000))
    assert await query_plan(database, _sums_query(since)) == [POSTED_SINCE]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_an_invoice_reads_only_its_month_and_events_posted_since_the_previous_one(database: Database) -> None:
    month, late = _parts({"a tenant": Coverage("2026-10", 900)}, Coverage("2026-11", 1000))
    index = "ix_usage_events_tenant_id_billing_day"
    assert await query_plan(database, _sums_query(month)) == [
        f"SEARCH usage_events USING INDEX {index} (tenant_id=? AND billing_day>? AND billing_day<?)"
    ]
    assert await query_plan(database, _sums_query(late)) == [POSTED_SINCE]


async def test_events_corrected_to_zero_in_another_currency_do_not_prevent_closing(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    price = await add_price(database)
    day, epoch_id = OCTOBER.date(), cast.epoch_id
    cost = await post_event(database, cast.bob, day, Tokens(), epoch_id=epoch_id, price=price)
    await post_event(database, cast.bob, day, Tokens(prompt=7), epoch_id=epoch_id, price=price, currency="USD")
    invoices, corrections = euro_invoices(database, clock, BillingCalendar("UTC")), utc_corrections(database, clock)
    foreign = (await all_events(database))[1]

    await corrections.add(foreign.id, Correction(note="half of it", cost_picos=-foreign.cost_picos // 2))
    with pytest.raises(CurrenciesMixed, match="EUR and USD"):
        await invoices.draft(cast.bob.tenant.id, "2026-10", access=OWNER)
    await corrections.add(foreign.id, Correction(note="and the rest", cost_picos=-foreign.cost_picos // 2))
    drafted = await invoices.draft(cast.bob.tenant.id, "2026-10", access=OWNER)
    closed = await invoices.close(drafted.head.id, access=OWNER)

    assert (closed.currency, [line.exact_picos for line in closed.lines], usage_picos(closed.lines)) == (
        "EUR", [10_000_000, 15_000_000], cost,
    )  # fmt: skip
    async with database.reading() as connection:
        assert (await invoice_invariant.check(connection)).state == "holds"


async def test_the_first_and_last_day_of_a_month_are_on_its_invoice(database: Database, clock: FakeClock, cast: Cast) -> None:
    price, invoices = await add_price(database), euro_invoices(database, clock, BillingCalendar("UTC"))
    days = {8: (1, 31), 9: (1, 30), 10: (1, 31), 11: (1,)}
    for month, days_of_month in days.items():
        for day in days_of_month:
            await post_event(database, cast.bob, date(2026, month, day), Tokens(prompt=1), epoch_id=cast.epoch_id, price=price)
    for month in (8, 9, 10):
        drafted = await invoices.draft(cast.bob.tenant.id, f"2026-{month:02d}", access=OWNER)
        for invoice in (drafted, await invoices.close(drafted.head.id, access=OWNER)):
            events = (await invoices.events(invoice.head.id, access=OWNER)).data
            assert [(event.billing_day.month, event.billing_day.day) for event in events] == [
                (month, 1),
                (month, days[month][1]),
            ]
            assert [(line.kind, line.tokens) for line in invoice.lines] == [("prompt", 2), ("completion", 10)]


async def test_a_line_counts_the_requests_with_tokens_of_its_kind(database: Database, clock: FakeClock, cast: Cast) -> None:
    price, invoices = await add_price(database), euro_invoices(database, clock, BillingCalendar("UTC"))
    for tokens in (
        Tokens(prompt=1, completion=1), Tokens(prompt=1, completion=1), Tokens(prompt=1, completion=1, rejected=1),
        Tokens(prompt=1, cached=1, completion=0, rejected=1), Tokens(prompt=2, cached=1, completion=1),
    ):  # fmt: skip
        await post_event(database, cast.bob, OCTOBER.date(), tokens, epoch_id=cast.epoch_id, price=price)
    drafted = await invoices.draft(cast.bob.tenant.id, "2026-10", access=OWNER)
    assert [(line.kind, line.requests) for line in drafted.lines] == [
        ("prompt", 4), ("cached_prompt", 2), ("completion", 4), ("rejected_draft", 2),
    ]  # fmt: skip


async def test_a_closed_invoice_keeps_the_reasons_of_the_corrections_that_it_bills(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    price, invoices = await add_price(database), euro_invoices(database, clock, BillingCalendar("UTC"))
    for person in (cast.bob, cast.charlie):
        await post_event(database, person, OCTOBER.date(), Tokens(prompt=9), epoch_id=cast.epoch_id, price=price)
    bobs, charlies = await all_events(database)
    corrections = utc_corrections(database, clock)
    await corrections.add(charlies.id, Correction(note="not Bob's", prompt_tokens=-1))
    await corrections.add(bobs.id, Correction(note="too much", prompt_tokens=-1))
    drafted = await invoices.draft(cast.bob.tenant.id, "2026-10", access=OWNER)
    await corrections.add(bobs.id, Correction(note="again", prompt_tokens=-1))
    closed = await invoices.close(drafted.head.id, access=OWNER)
    await corrections.add(bobs.id, Correction(note="after the closing", cost_picos=1))
    clock.jump_wall(timedelta(days=30).total_seconds())
    following = await invoices.draft(cast.bob.tenant.id, "2026-11", access=OWNER)

    found = [[line.reasons for line in invoice.lines] for invoice in (drafted, closed, following)]
    assert found == [[(), (), ("too much",)], [(), (), ("too much", "again")], [("after the closing",)]]
    assert (await invoices.get(closed.head.id, access=OWNER)).lines == closed.lines
    async with database.reading() as connection:
        assert (await invoice_invariant.check(connection)).state == "holds"
    await tamper(database, "UPDATE invoice_lines SET reasons = NULL")  # as a version that knew no reasons had closed it
    async with database.reading() as connection:
        assert (await invoice_invariant.check(connection)).state == "holds"
    forged = """UPDATE invoice_lines SET reasons = '{"texts": ["too much"], "left_out": 0}' WHERE kind = 'adjustment'"""
    await tamper(database, forged)
    async with database.reading() as connection:
        assert (await invoice_invariant.check(connection)).state == "broken"


async def test_the_reasons_of_corrections_in_a_cancelled_currency_are_on_no_line(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    price, invoices = await add_price(database), euro_invoices(database, clock, BillingCalendar("UTC"))
    for currency in ("USD", "EUR"):
        await post_event(database, cast.bob, OCTOBER.date(), Tokens(), epoch_id=cast.epoch_id, price=price, currency=currency)
    foreign = (await all_events(database))[0]
    await utc_corrections(database, clock).add(foreign.id, Correction(note="not owed", cost_picos=-foreign.cost_picos))
    drafted = await invoices.draft(cast.bob.tenant.id, "2026-10", access=OWNER)
    assert [line.reasons for line in drafted.lines] == [(), ()]
