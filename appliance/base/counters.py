"""Counters without gaps: numbers taken inside the transaction that uses them. Knows nothing of what they number.

The row stays locked until that transaction ends, so whoever takes the next number waits, and a rollback gives it back.
"""

from __future__ import annotations

from sqlalchemy import bindparam, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.tables import counters

POSTING = "posting"
"""Counts the usage events that reached their final state, in that order."""

_ADVANCE = (
    update(counters)
    .where(counters.c.name == bindparam("of_name"))
    .values(value=counters.c.value + bindparam("count"))
    .returning(counters.c.value)
)


async def take(connection: AsyncConnection, name: str, count: int = 1) -> int:
    """Return the first of `count` consecutive numbers; the first number of a new counter is 1.

    Raises ValueError for less than one number.
    """
    if count < 1:
        raise ValueError(f"at least one number is taken, not {count}")
    parameters = {"of_name": name, "count": count}
    last = (await connection.execute(_ADVANCE, parameters)).scalar_one_or_none()
    if last is None:
        await _create(connection, name)
        last = (await connection.execute(_ADVANCE, parameters)).scalar_one()
    return int(last) - count + 1


async def locked(connection: AsyncConnection, name: str) -> int:
    """Return the number taken last (0: none yet) and hold the counter: nobody takes another until the transaction ends."""
    value = (await connection.execute(_ADVANCE, {"of_name": name, "count": 0})).scalar_one_or_none()
    if value is None:
        await _create(connection, name)
        value = (await connection.execute(_ADVANCE, {"of_name": name, "count": 0})).scalar_one()
    return int(value)


async def last_taken(connection: AsyncConnection, name: str) -> int:
    """Return the number taken last (0: none yet) as this connection sees it. Holds nothing."""
    value = (await connection.execute(select(counters.c.value).where(counters.c.name == name))).scalar_one_or_none()
    return 0 if value is None else int(value)


async def _create(connection: AsyncConnection, name: str) -> None:
    """Begin the counter at 0, unless another transaction did so in between."""
    insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    await connection.execute(insert(counters).values(name=name, value=0).on_conflict_do_nothing())
