"""Gapless counters, advanced inside the transaction that uses the numbers. Independent of what is numbered.

The counter's row stays locked until that transaction ends, so the next taker waits, and a rollback returns the numbers.
"""

from __future__ import annotations

from sqlalchemy import Connection, bindparam, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.db import insert_for
from appliance.base.prepared import Prepared
from appliance.base.tables import counters

POSTING = "posting"
"""Numbers usage events in the order in which they reached their final state."""

_ADVANCE = Prepared(
    update(counters)
    .where(counters.c.name == bindparam("of_name"))
    .values(value=counters.c.value + bindparam("count"))
    .returning(counters.c.value)
)


async def take(connection: AsyncConnection, name: str, count: int = 1) -> int:
    """Take `count` consecutive numbers and return the first. A new counter starts at 1.

    Raises ValueError if `count` is below 1.
    """
    return await connection.run_sync(take_sync, name, count)


def take_sync(connection: Connection, name: str, count: int = 1) -> int:
    """Synchronous version of `take`."""
    if count < 1:
        raise ValueError(f"count must be at least 1, not {count}")
    return _advance(connection, name, count) - count + 1


async def lock(connection: AsyncConnection, name: str) -> int:
    """Lock the counter until the transaction ends, and return the last number taken (0: none yet)."""
    return await connection.run_sync(_advance, name, 0)


def _advance(connection: Connection, name: str, count: int) -> int:
    """Advance the counter by `count` and return its value. Creates a missing counter at 0."""
    parameters = {"of_name": name, "count": count}
    value = _ADVANCE.scalar(connection, parameters)
    if value is None:
        # Another transaction may have created the counter in between.
        first = insert_for(connection.dialect.name, counters).values(name=name, value=0)
        connection.execute(first.on_conflict_do_nothing())
        value = _ADVANCE.scalar(connection, parameters)
    return int(value)


async def last_taken(connection: AsyncConnection, name: str) -> int:
    """Return the last number taken (0: none yet) as visible to this connection, without locking the counter."""
    value = (await connection.execute(select(counters.c.value).where(counters.c.name == name))).scalar_one_or_none()
    return 0 if value is None else int(value)
