"""Counters have no gaps: the next transaction reuses the numbers of a failed one."""

from __future__ import annotations

import asyncio

import pytest

from appliance.base.counters import last_taken, lock, take
from appliance.base.db import Database


async def taken(database: Database, name: str, count: int = 1) -> int:
    async with database.writing() as connection:
        return await take(connection, name, count)


async def test_numbers_begin_at_one_and_follow_each_other(database: Database) -> None:
    assert [await taken(database, "invoice 2026"), await taken(database, "invoice 2026", 3)] == [1, 2]
    assert await taken(database, "invoice 2026") == 5
    assert await taken(database, "invoice 2027") == 1


async def test_a_rollback_gives_the_number_back(database: Database) -> None:
    async def fail() -> None:
        async with database.writing() as connection:
            assert await take(connection, "posting", 7) == 1
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk"):
        await fail()
    assert await taken(database, "posting") == 1


async def test_takers_at_once_get_numbers_of_their_own(database: Database) -> None:
    numbers = await asyncio.gather(*(taken(database, "posting") for _ in range(20)))
    assert sorted(numbers) == list(range(1, 21))


async def test_a_locked_counter_tells_its_last_number_and_keeps_it(database: Database) -> None:
    async with database.writing() as connection:
        assert await lock(connection, "new") == 0
        await take(connection, "new", 4)
        assert await lock(connection, "new") == 4
    async with database.reading() as connection:
        assert (await last_taken(connection, "new"), await last_taken(connection, "other")) == (4, 0)


async def test_less_than_one_number_is_no_number(database: Database) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        await taken(database, "posting", 0)
