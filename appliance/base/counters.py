"""Counters without gaps: numbers taken inside the transaction that uses them. Knows nothing of what they number.

The row stays locked until that transaction ends, so whoever takes the next number waits, and a rollback gives it back.
"""

from __future__ import annotations

from sqlalchemy import Connection, bindparam, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.db import insert_for
from appliance.base.prepared import Prepared
from appliance.base.tables import counters

POSTING = "posting"
"""Counts the usage events that reached their final state, in that order."""

_ADVANCE = Prepared(
    update(counters)
    .where(counters.c.name == bindparam("of_name"))
    .values(value=counters.c.value + bindparam("count"))
    .returning(counters.c.value)
)


async def take(connection: AsyncConnection, name: str, count: int = 1) -> int:
    """Return the first of `count` consecutive numbers; the first number of a new counter is 1.

    Raises ValueError for less than one number.
    """
    return await connection.run_sync(take_sync, name, count)


def take_sync(connection: Connection, name: str, count: int = 1) -> int:
    """Like `take`, on a synchronous connection."""
    if count < 1:
        raise ValueError(f"at least one number is taken, not {count}")
    return _advanced(connection, name, count) - count + 1


async def locked(connection: AsyncConnection, name: str) -> int:
    """Return the number taken last (0: none yet) and hold the counter: nobody takes another until the transaction ends."""
    return await connection.run_sync(_advanced, name, 0)


def _advanced(connection: Connection, name: str, count: int) -> int:
    """Return the last number after `count` more; a counter that is not there begins at 0."""
    parameters = {"of_name": name, "count": count}
    value = _ADVANCE.scalar(connection, parameters)
    if value is None:
        # Unless another transaction did so in between.
        first = insert_for(connection.dialect.name, counters).values(name=name, value=0)
        connection.execute(first.on_conflict_do_nothing())
        value = _ADVANCE.scalar(connection, parameters)
    return int(value)


async def last_taken(connection: AsyncConnection, name: str) -> int:
    """Return the number taken last (0: none yet) as this connection sees it. Holds nothing."""
    value = (await connection.execute(select(counters.c.value).where(counters.c.name == name))).scalar_one_or_none()
    return 0 if value is None else int(value)
