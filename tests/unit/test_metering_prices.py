"""The price book: which price is in effect at a time. Usage is never rated again."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.clock import rfc3339
from appliance.base.db import Database
from appliance.base.errors import InvalidValue, NotFound, PriceBegun
from appliance.base.money import PRICE_MICROS_MAX
from appliance.metering.prices import Price, PriceBook
from tests.support import factories
from tests.support.clock import START, FakeClock
from tests.support.ledgers import euro_prices


async def add(book: PriceBook, **changes: Any) -> Price:
    values: dict[str, Any] = {"model": "demo", "currency": "EUR", "prompt": 10, "cached_prompt": 1, "completion": 30}
    return await book.add(**(values | changes))


async def test_a_model_without_a_price_has_no_current_price(database: Database, clock: FakeClock) -> None:
    assert await euro_prices(database, clock).current("demo", clock.now()) is None


async def test_a_price_of_zero_costs_nothing(database: Database, clock: FakeClock) -> None:
    free = await add(euro_prices(database, clock), prompt=0, cached_prompt=0, completion=0, batch_percent=0)
    assert free.rate("standard").cost_picos(prompt_tokens=9, cached_tokens=4, completion_tokens=3) == 0


async def test_the_current_price_is_the_latest_that_is_in_effect(database: Database, clock: FakeClock) -> None:
    book = euro_prices(database, clock)
    first = await add(book)
    second = await add(book, prompt=20, effective_from=START + timedelta(days=1))
    await add(book, model="other", prompt=99)
    assert await book.current("demo", START - timedelta(seconds=1)) is None
    assert await book.current("demo", START) == first
    assert await book.current("demo", START + timedelta(days=1) - timedelta(microseconds=1)) == first
    assert await book.current("demo", START + timedelta(days=1)) == second


async def test_a_new_price_is_seen_at_once_despite_the_cache(database: Database, clock: FakeClock) -> None:
    book = euro_prices(database, clock)
    assert await book.current("demo", clock.now()) is None
    price = await add(book)
    assert await book.current("demo", clock.now()) == price
    clock.advance(1)
    later = await add(book, prompt=11)
    assert await book.current("demo", clock.now()) == later


async def test_prices_added_by_another_process_are_seen_after_the_cache_is_cleared(
    database: Database, clock: FakeClock
) -> None:
    book, elsewhere = euro_prices(database, clock), euro_prices(database, clock)
    for model in ("demo", "other"):
        assert await book.current(model, clock.now()) is None
    added = [await add(elsewhere, model=model) for model in ("demo", "other")]
    book.clear_cache()
    assert [await book.current(model, clock.now()) for model in ("demo", "other")] == added


@pytest.mark.parametrize("adds", ["the book itself", "another process"])
async def test_prices_read_while_one_is_added_are_not_cached(
    database: Database, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, adds: str
) -> None:
    book, reading, is_read, may_go_on = euro_prices(database, clock), database.reading, asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def delayed_reading() -> AsyncIterator[AsyncConnection]:
        async with reading() as connection:
            yield connection
        is_read.set()
        await may_go_on.wait()

    with monkeypatch.context() as delayed:
        delayed.setattr(database, "reading", delayed_reading)
        reader = asyncio.create_task(book.current("demo", clock.now()))
        await is_read.wait()
    if adds == "another process":
        price = await add(euro_prices(database, clock))
        book.clear_cache()
    else:
        price = await add(book)
    may_go_on.set()
    assert await reader is None
    assert await book.current("demo", clock.now()) == price


async def test_only_the_first_price_of_a_model_may_begin_in_the_past(database: Database, clock: FakeClock) -> None:
    book = euro_prices(database, clock)
    await add(book, effective_from=START - timedelta(days=300))
    await add(book, effective_from=START - timedelta(seconds=59))
    with pytest.raises(InvalidValue) as refused:
        await add(book, effective_from=START - timedelta(seconds=61))
    assert refused.value.param == "effective_from"


async def test_two_prices_with_the_same_start_are_refused(database: Database, clock: FakeClock) -> None:
    book = euro_prices(database, clock)
    await add(book)
    with pytest.raises(InvalidValue, match="already") as refused:
        await add(book)
    assert refused.value.param == "effective_from"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", -1),
        ("completion", PRICE_MICROS_MAX + 1),
        ("cached_prompt", 1.5),
        ("prompt", True),
        ("batch_percent", 101),
        ("rejected_draft", -1),
        ("currency", "eur"),
        ("currency", "EURO"),
        ("model", ""),
        ("effective_from", datetime(2027, 1, 1)),
    ],
)
async def test_an_invalid_field_is_named(database: Database, clock: FakeClock, field: str, value: object) -> None:
    with pytest.raises(InvalidValue) as refused:
        await add(euro_prices(database, clock), **{field: value})
    assert refused.value.param == field


async def test_each_currency_has_its_own_prices(database: Database, clock: FakeClock) -> None:
    book = PriceBook(database, clock, currency="CHF")
    francs, euros = await add(book, currency="CHF"), await add(book, currency="EUR", prompt=11)
    assert await book.current("demo", clock.now()) == francs
    assert await book.current("demo", clock.now(), currency="EUR") == euros
    assert await book.current("demo", clock.now(), currency="USD") is None
    clock.advance(3600)
    await add(book, currency="USD", effective_from=START - timedelta(days=3))  # the first in dollars
    with pytest.raises(InvalidValue, match="already has a price in CHF; a new one cannot begin in the past"):
        await add(book, currency="CHF", effective_from=START - timedelta(days=3))


async def test_future_prices_take_effect_by_themselves_in_order_of_their_start(database: Database, clock: FakeClock) -> None:
    book = euro_prices(database, clock)
    now = await add(book)
    next_month = await add(book, prompt=30, effective_from=START + timedelta(days=30))
    next_week = await add(book, prompt=20, effective_from=START + timedelta(days=7))
    assert [await book.current("demo", START + timedelta(days=days)) for days in (6, 7, 29, 30)] == [
        now,
        next_week,
        next_week,
        next_month,
    ]


async def test_a_price_with_the_start_of_a_future_one_is_refused_naming_it(database: Database, clock: FakeClock) -> None:
    book = euro_prices(database, clock)
    existing = await add(book, effective_from=START + timedelta(days=30))
    with pytest.raises(InvalidValue, match=existing.id) as refused:
        await add(book, prompt=9, effective_from=START + timedelta(days=30))
    assert refused.value.param == "effective_from"
    assert (await book.list()).data == [existing]


async def test_the_start_of_a_price_is_rounded_to_the_precision_shown(database: Database, clock: FakeClock) -> None:
    book = euro_prices(database, clock)
    existing = await add(book, effective_from=START + timedelta(days=30, microseconds=1999))
    assert existing.effective_from == datetime.fromisoformat(rfc3339(existing.effective_from))
    with pytest.raises(InvalidValue, match=existing.id):
        await add(book, prompt=9, effective_from=existing.effective_from + timedelta(microseconds=1))


def test_discounts_of_tier_and_batch_multiply_to_integer_unit_prices() -> None:
    price = dataclasses.replace(factories.price(prompt=1_000_001, cached=3, completion=5), tier_percents={"batch": 50})
    assert price.rate("interactive").prompt == 1_000_001
    assert price.rate("batch").prompt == 500_001  # 500 000.5, half up
    rate = price.rate("batch", batch=True)  # 50 % of 50 %
    assert (rate.basis_points, rate.prompt, rate.cached_prompt, rate.completion) == (2500, 250_000, 1, 1)
    assert rate.cost_picos(prompt_tokens=10, cached_tokens=4, completion_tokens=3) == 6 * 250_000 + 4 * 1 + 3 * 1
    assert price.rate_at(rate.basis_points) == rate


def test_rejected_draft_tokens_are_free_unless_the_price_charges_them() -> None:
    price = factories.price()
    counts = {"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 2}
    rate, dearer = price.rate("standard"), dataclasses.replace(price, rejected_draft=7).rate("standard")
    assert rate.cost_picos(**counts, rejected_tokens=9) == rate.cost_picos(**counts)
    assert dearer.cost_picos(**counts, rejected_tokens=9) == rate.cost_picos(**counts) + 63


@pytest.mark.parametrize("percents", [{"gold": 10}, {"batch": 101}, {"batch": -1}, {"batch": 1.5}, ["batch"]])
async def test_an_invalid_percentage_of_a_tier_is_named(database: Database, clock: FakeClock, percents: Any) -> None:
    with pytest.raises(InvalidValue) as refused:
        await add(euro_prices(database, clock), tier_percents=percents)
    assert str(refused.value.param).startswith("tier_percents")


async def test_paging_returns_every_price_once(database: Database, clock: FakeClock) -> None:
    book = euro_prices(database, clock)
    added = [await add(book, model=f"m{number}") for number in range(5)]
    first = await book.list(3)
    second = await book.list(3, first.next_cursor)
    assert sorted(price.id for price in first.data + second.data) == sorted(price.id for price in added)
    assert (first.has_more, second.has_more) == (True, False)


async def test_a_future_price_can_be_withdrawn_and_replaced(database: Database, clock: FakeClock) -> None:
    book = euro_prices(database, clock)
    first = await add(book)
    moment = START + timedelta(days=60_000)  # later than the clock of the database by any reckoning
    typo = await add(book, prompt=1, effective_from=moment)
    assert await book.current("demo", moment) == typo
    assert await book.withdraw(typo.id) == typo
    assert await book.current("demo", moment) == first
    right = await add(book, prompt=20, effective_from=moment)
    assert await book.current("demo", moment) == right
    with pytest.raises(NotFound):
        await book.withdraw(typo.id)


async def test_a_price_that_begins_within_a_minute_cannot_be_withdrawn(database: Database) -> None:
    now = START + timedelta(days=60_000)  # by the clock of the database nothing has begun: it is ours that refuses
    book = euro_prices(database, FakeClock(now))
    for moment in (now, now + timedelta(seconds=60)):
        price = await add(book, effective_from=moment)
        with pytest.raises(PriceBegun) as refused:
            await book.withdraw(price.id)
        assert refused.value.status == 409
    later = await add(book, effective_from=now + timedelta(seconds=60, milliseconds=1))
    assert await book.withdraw(later.id) == later
    assert len((await book.list()).data) == 2


async def test_a_price_in_effect_by_the_clock_of_the_database_cannot_be_withdrawn(database: Database) -> None:
    book = euro_prices(database, FakeClock(START - timedelta(days=9000)))
    price = await add(book, effective_from=START - timedelta(days=8000))
    with pytest.raises(PriceBegun):
        await book.withdraw(price.id)
    assert (await book.list()).data == [price]
