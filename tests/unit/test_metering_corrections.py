"""Corrections are new signed events: they add up with the one they correct, and never to less than nothing."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from appliance.base.db import Database
from appliance.base.errors import InvalidValue, NotFound
from appliance.metering.calendar import BillingCalendar
from appliance.metering.corrections import NOTE_CHARS_MAX, Correction, Corrections
from appliance.metering.prices import PriceBook
from appliance.metering.records import UsageEvent
from appliance.metering.usage import UsageReports
from tests.support import factories
from tests.support.cast import Cast
from tests.support.clock import START, FakeClock
from tests.support.ledgers import all_events, running_ledger


@pytest.fixture
async def event(database: Database, clock: FakeClock, cast: Cast) -> UsageEvent:
    """A posted event of Bob's at half the price: 10 prompt tokens, 4 of them cached, 5 of output."""
    price = await PriceBook(database, clock).add(model="demo", currency="EUR", prompt=1000, cached_prompt=100, completion=2000)
    entry = factories.pending(cast.bob, price=price, price_basis_points=5000)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await ledger.open(entry)
        posted = await ledger.settle(factories.posted(entry.request_id, prompt=10, cached=4, completion=5))
    clock.advance(86400)
    return posted


async def correct(database: Database, clock: FakeClock, event_id: int, **fields: Any) -> UsageEvent:
    return await Corrections(database, clock).add(event_id, Correction(**({"note": "a retry of ours"} | fields)))


async def test_a_correction_is_a_new_event_at_the_rate_and_on_the_day_of_the_one_it_corrects(
    database: Database, clock: FakeClock, event: UsageEvent
) -> None:
    correction = await correct(database, clock, event.id, prompt_tokens=-10, cached_tokens=-4, completion_tokens=-5)
    assert correction.cost_picos == -event.cost_picos == -(6 * 500 + 4 * 50 + 5 * 1000)
    assert (correction.kind, correction.status, correction.corrects_id) == ("adjustment", "posted", event.id)
    assert (correction.billing_day, correction.admitted_at) == (event.billing_day, event.admitted_at)
    assert (correction.posting, correction.settled_at) == (2, clock.now())
    assert await all_events(database) == [event, correction]


async def test_reports_show_what_stands_after_the_correction(database: Database, clock: FakeClock, event: UsageEvent) -> None:
    await correct(database, clock, event.id, completion_tokens=-2)
    (row,) = await UsageReports(database).usage(START - timedelta(days=1), START + timedelta(days=1))
    assert (row.requests, row.completion_tokens, row.cost_picos) == (1, 3, event.cost_picos - 2 * 1000)


async def test_money_alone_can_be_given_back_but_not_more_than_was_taken(
    database: Database, clock: FakeClock, event: UsageEvent
) -> None:
    credit = await correct(database, clock, event.id, cost_picos=-event.cost_picos + 1)
    assert (credit.cost_picos, credit.price_id, credit.prompt_tokens) == (-event.cost_picos + 1, None, 0)
    with pytest.raises(InvalidValue, match="only 1 stand there") as refused:
        await correct(database, clock, event.id, cost_picos=-2)
    assert refused.value.param == "cost_picos"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"completion_tokens": -6}, "completion_tokens"),
        ({"prompt_tokens": -7}, "cached_tokens"),
        ({"cached_tokens": 7}, "cached_tokens"),
        ({"prompt_tokens": 10**12 + 1}, "prompt_tokens"),
        ({"prompt_tokens": 1.5}, "prompt_tokens"),
        ({"rejected_tokens": -1}, "rejected_tokens"),
        ({"completion_tokens": -1, "cost_picos": -5}, "cost_picos"),
        ({"cost_picos": 0}, "cost_picos"),
        ({"cost_picos": -(2**63)}, "cost_picos"),
        ({}, "prompt_tokens"),
        ({"completion_tokens": -1, "note": " "}, "note"),
        ({"completion_tokens": -1, "note": "x" * (NOTE_CHARS_MAX + 1)}, "note"),
        ({"completion_tokens": -1, "note": "a\x00b"}, "note"),
    ],
)
async def test_a_correction_that_cannot_be_is_refused_by_name_and_changes_nothing(
    database: Database, clock: FakeClock, event: UsageEvent, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidValue) as refused:
        await correct(database, clock, event.id, **fields)
    assert refused.value.param == param
    assert await all_events(database) == [event]


async def test_only_what_was_settled_as_usage_is_corrected(
    database: Database, clock: FakeClock, cast: Cast, event: UsageEvent
) -> None:
    adjustment = await correct(database, clock, event.id, completion_tokens=1)
    entry, refused = factories.pending(cast.bob), factories.pending(cast.bob)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await ledger.open(entry)
        await ledger.open(refused)
        await ledger.settle(factories.voided(refused.request_id))
        pending, void = (await all_events(database))[-2:]
        for event_id in (adjustment.id, pending.id, void.id):
            with pytest.raises(InvalidValue) as not_this:
                await correct(database, clock, event_id, completion_tokens=1)
            assert not_this.value.param == "event_id"
        with pytest.raises(NotFound):
            await correct(database, clock, 10**9, completion_tokens=1)
        await ledger.settle(factories.posted(entry.request_id))
    postings = sorted(each.posting or 0 for each in await all_events(database))
    assert postings == [1, 2, 3, 4]


async def test_of_corrections_at_once_only_as_many_succeed_as_there_is_to_take_back(
    database: Database, clock: FakeClock, event: UsageEvent
) -> None:
    tries = await asyncio.gather(
        *(correct(database, clock, event.id, completion_tokens=-2) for _ in range(6)), return_exceptions=True
    )
    assert sum(isinstance(result, UsageEvent) for result in tries) == 2
    assert sum(each.completion_tokens for each in await all_events(database)) == 1


async def test_a_correction_is_heard_of_in_its_transaction(database: Database, clock: FakeClock, event: UsageEvent) -> None:
    heard: list[UsageEvent] = []

    async def hear(_connection: object, events: Any) -> None:
        heard.extend(events)

    corrections = Corrections(database, clock, calendar=BillingCalendar("Asia/Tokyo"), on_settled=hear)
    made = await corrections.add(event.id, Correction(note="too much", completion_tokens=-1))
    assert heard == [made]
