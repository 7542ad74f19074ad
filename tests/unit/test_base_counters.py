"""Counters have no gaps: the next transaction reuses the numbers of a failed one."""

from __future__ import annotations

import asyncio

import pytest

from appliance.base.counters import last_taken, lock, take
from appliance.base.db import Database


async def take_number(database: Database, name: str, count: int = 1) -> int:
    async with database.writing() as connection:
        return await take(connection, name, count)


async def test_numbers_start_at_one_and_are_consecutive_per_counter(database: Database) -> None:
    assert [await take_number(database, "invoice 2026"), await take_number(database, "invoice 2026", 3)] == [1, 2]
    assert await take_number(database, "invoice 2026") == 5
    assert await take_number(database, "invoice 2027") == 1


async def test_a_rollback_returns_its_numbers(database: Database) -> None:
    async def fail() -> None:
        async with database.writing() as connection:
            assert await take(connection, "posting", 7) == 1
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk"):
        await fail()
    assert await take_number(database, "posting") == 1


async def test_concurrent_transactions_get_distinct_numbers(database: Database) -> None:
    numbers = await asyncio.gather(*(take_number(database, "posting") for _ in range(20)))
    assert sorted(numbers) == list(range(1, 21))


async def test_locking_a_counter_returns_its_last_number_without_taking_one(database: Database) -> None:
    async with database.writing() as connection:
        assert await lock(connection, "new") == 0
        await take(connection, "new", 4)
        assert await lock(connection, "new") == 4
    async with database.reading() as connection:
        assert (await last_taken(connection, "new"), await last_taken(connection, "other")) == (4, 0)


async def test_taking_less_than_one_number_is_refused(database: Database) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        await take_number(database, "posting", 0)
