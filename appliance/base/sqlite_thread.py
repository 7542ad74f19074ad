"""A SQLite connection in a dedicated thread: a transaction of any number of statements costs one event-loop iteration.

The asyncio driver switches to its thread and back several times per statement, which is too slow for many transactions a second
of many statements each. Independent of tables and locks.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import suppress
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine

from appliance.base.call_thread import CallThread

P = ParamSpec("P")
T = TypeVar("T")


class SqliteThread:
    """The thread and its connection. The caller must serialise writes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread: CallThread | None = None
        self._connection: Connection | None = None

    async def write(self, fn: Callable[Concatenate[Connection, P], T], *args: P.args, **options: P.kwargs) -> T:
        """Run `fn(connection, …)` in a transaction and return its result. Rolls back if it raises."""
        if self._thread is None:
            self._thread = CallThread("sqlite writer")
        if self._connection is None:
            self._connection = await self._thread.call(self._engine.connect)
        connection = self._connection
        return await self._thread.call(lambda: _committed(connection, fn, *args, **options))

    async def close(self) -> None:
        """Close the connection and stop the thread."""
        if self._thread is not None:
            if self._connection is not None:
                await self._thread.call(self._connection.close)
                self._connection = None
            self._thread.end()
            self._thread = None
        self._engine.dispose()


def _committed(connection: Connection, fn: Callable[Concatenate[Connection, P], T], *args: P.args, **options: P.kwargs) -> T:
    try:
        result = fn(connection, *args, **options)
        connection.commit()
    except BaseException:
        _roll_back(connection)
        raise
    return result


def _roll_back(connection: Connection) -> None:
    connection.rollback()
    # A failed COMMIT ends the transaction for SQLAlchemy but not for SQLite, where it would stay open and never be committed.
    with suppress(sqlite3.Error):  # the next BEGIN reports it
        connection.connection.rollback()
