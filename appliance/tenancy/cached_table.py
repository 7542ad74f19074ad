"""A small table that is kept in memory as a whole, until this process changes it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from sqlalchemy import Table

from appliance.base.db import Database
from appliance.base.shared_reads import SharedReads

V = TypeVar("V")


class CachedTable(Generic[V]):
    """The value that `read` makes of `table`. Changes are made in `Database.changing_principals(table.name)`."""

    def __init__(self, db: Database, table: Table, read: Callable[[], Coroutine[Any, Any, V]]) -> None:
        self._changes = db.principal_changes
        self._table = table.name
        self._read = read
        self._reads: SharedReads[int, V] = SharedReads()
        self._cached: tuple[int, V] | None = None

    async def get(self) -> V:
        """Return the value. Reads the database only after a change, once for all callers."""
        count = self._changes.value
        if self._cached is None or not self._changes.is_current(self._cached[0], self._table):
            self._cached = count, await self._reads.get(count, self._read)
        return self._cached[1]
