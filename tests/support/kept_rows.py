"""What is made in one empty database after another is made once: from then on its rows are copied, in one transaction."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import Table, insert, select

from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.tables import counters, metadata
from tests.support.clock import FakeClock

Made = TypeVar("Made")
Make = Callable[[Database, Clock], Awaitable[Made]]
_KEPT: dict[tuple[Make[Any], datetime], tuple[Any, list[tuple[Table, list[dict[str, Any]]]]]] = {}


async def made_in(database: Database, clock: Clock, make: Make[Made]) -> Made:
    """Return what `make` does, and have its rows in `database`, which is empty but for what migrations write.

    What it returns must not change, and only a clock that stands still makes the same twice.
    """
    if not isinstance(clock, FakeClock):
        return await make(database, clock)
    place = (make, clock.now())
    if place in _KEPT:
        made, written = _KEPT[place]
        async with database.changing_principals() as connection:
            for table, rows in written:
                await connection.execute(insert(table), rows)
        return made  # type: ignore[no-any-return]
    made = await make(database, clock)
    async with database.reading() as connection:
        found = [(table, (await connection.execute(select(table))).mappings().all()) for table in metadata.sorted_tables]
    _KEPT[place] = made, [(table, [dict(row) for row in rows]) for table, rows in found if rows and table is not counters]
    return made
