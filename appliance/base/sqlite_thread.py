"""A SQLite connection in a thread of its own: `run_sync` sends any number of statements in one turn of the event loop.

The driver for asyncio crosses to its thread and back several times per statement. Whoever writes many statements in each of
many transactions a second takes this instead. Knows no tables and no locks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, CursorResult, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

P = ParamSpec("P")
T = TypeVar("T")


class ThreadConnection(AsyncConnection):
    """A connection inside a transaction. Streams and savepoints are not offered."""

    def __init__(self, engine: AsyncEngine, connection: Connection, thread: ThreadPoolExecutor) -> None:
        super().__init__(engine, connection)
        self._connection = connection
        self._thread = thread

    async def run_sync(self, fn: Callable[Concatenate[Connection, P], T], *args: P.args, **options: P.kwargs) -> T:
        """Return what `fn(connection, …)` returns, called in the thread; results of queries must be read there."""
        call = partial(fn, self._connection, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def execute(self, statement: Any, parameters: Any = None, **options: Any) -> CursorResult[Any]:
        """Return the result of one statement, read to its end."""
        return await self.run_sync(_execute_and_read, statement, parameters, **options)


class SqliteThread:
    """The thread and its connection. `writing` is one transaction; who calls it sees to it that there is one at a time."""

    def __init__(self, engine: Engine, as_engine: AsyncEngine) -> None:
        self._engine = engine
        self._as_engine = as_engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sqlite writer")
        self._connection: ThreadConnection | None = None

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """Yield a connection whose first statement begins a transaction: committed when the block ends, else rolled back."""
        connection = await self._opened()
        try:
            yield connection
            await connection.run_sync(Connection.commit)
        except BaseException:
            # Comes after what still runs in the thread for a caller that was cancelled.
            await asyncio.shield(connection.run_sync(Connection.rollback))
            raise

    async def write(self, fn: Callable[Concatenate[Connection, P], T], *args: P.args, **options: P.kwargs) -> T:
        """Return what `fn(connection, …)` returns, called and committed in the thread in one go."""
        connection = await self._opened()
        return await connection.run_sync(lambda opened: _committed(opened, fn, *args, **options))

    async def _opened(self) -> ThreadConnection:
        if self._connection is None:
            opened = await asyncio.get_running_loop().run_in_executor(self._thread, self._engine.connect)
            self._connection = ThreadConnection(self._as_engine, opened, self._thread)
        return self._connection

    async def close(self) -> None:
        """End the thread and close the connection."""
        if self._connection is not None:
            await self._connection.run_sync(Connection.close)
            self._connection = None
        self._engine.dispose()
        self._thread.shutdown()


def _committed(connection: Connection, fn: Callable[Concatenate[Connection, P], T], *args: P.args, **options: P.kwargs) -> T:
    try:
        result = fn(connection, *args, **options)
        connection.commit()
    except BaseException:
        connection.rollback()
        raise
    return result


def _execute_and_read(connection: Connection, /, statement: Any, parameters: Any, **options: Any) -> Any:
    result = connection.execute(statement, parameters, **options)
    return result.freeze()() if result.returns_rows else result
