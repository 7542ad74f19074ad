"""The price book: which price is in force when, and that nothing is ever rated again."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from appliance.base.db import Database
from appliance.base.errors import InvalidValue
from appliance.base.money import PRICE_MICROS_MAX
from appliance.metering.prices import Price, PriceBook
from tests.support.clock import START, FakeClock


async def add(book: PriceBook, **changes: Any) -> Price:
    values: dict[str, Any] = {"model": "demo", "currency": "EUR", "prompt": 10, "cached_prompt": 1, "completion": 30}
    return await book.add(**(values | changes))


async def test_a_model_without_a_price_costs_nothing(database: Database, clock: FakeClock) -> None:
    assert await PriceBook(database, clock).current("demo", clock.now()) is None


async def test_the_price_in_force_is_the_latest_that_has_begun(database: Database, clock: FakeClock) -> None:
    book = PriceBook(database, clock)
    first = await add(book)
    second = await add(book, prompt=20, effective_from=START + timedelta(days=1))
    await add(book, model="other", prompt=99)
    assert await book.current("demo", START - timedelta(seconds=1)) is None
    assert await book.current("demo", START) == first
    assert await book.current("demo", START + timedelta(days=1) - timedelta(microseconds=1)) == first
    assert await book.current("demo", START + timedelta(days=1)) == second


async def test_a_new_price_is_known_at_once_although_prices_are_kept_in_memory(database: Database, clock: FakeClock) -> None:
    book = PriceBook(database, clock)
    assert await book.current("demo", clock.now()) is None
    price = await add(book)
    assert await book.current("demo", clock.now()) == price
    clock.advance(1)
    later = await add(book, prompt=11)
    assert await book.current("demo", clock.now()) == later


async def test_only_the_first_price_of_a_model_may_begin_in_the_past(database: Database, clock: FakeClock) -> None:
    book = PriceBook(database, clock)
    await add(book, effective_from=START - timedelta(days=300))
    await add(book, effective_from=START - timedelta(seconds=59))
    with pytest.raises(InvalidValue) as refused:
        await add(book, effective_from=START - timedelta(seconds=61))
    assert refused.value.param == "effective_from"


async def test_a_model_has_one_price_from_a_moment_on(database: Database, clock: FakeClock) -> None:
    book = PriceBook(database, clock)
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
        ("currency", "eur"),
        ("currency", "EURO"),
        ("currency", "USD"),
        ("model", ""),
        ("effective_from", datetime(2027, 1, 1)),
    ],
)
async def test_a_bad_field_is_named(database: Database, clock: FakeClock, field: str, value: object) -> None:
    with pytest.raises(InvalidValue) as refused:
        await add(PriceBook(database, clock), **{field: value})
    assert refused.value.param == field


async def test_only_the_currency_of_the_appliance_is_taken(database: Database, clock: FakeClock) -> None:
    book = PriceBook(database, clock, currency="CHF")
    with pytest.raises(InvalidValue, match="currency must be CHF"):
        await add(book, currency="EUR")
    assert (await add(book, currency="CHF")).currency == "CHF"


async def test_the_list_pages_through_every_price(database: Database, clock: FakeClock) -> None:
    book = PriceBook(database, clock)
    added = [await add(book, model=f"m{number}") for number in range(5)]
    first = await book.list(3)
    second = await book.list(3, first.next_cursor)
    assert sorted(price.id for price in first.data + second.data) == sorted(price.id for price in added)
    assert (first.has_more, second.has_more) == (True, False)
