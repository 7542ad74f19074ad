"""A SQLite connection in a thread of its own: `run_sync` sends any number of statements in one turn of the event loop.

The driver for asyncio crosses to its thread and back several times per statement. Whoever writes many statements in each of
many transactions a second takes this instead. Knows no tables and no locks.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, CursorResult, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

P = ParamSpec("P")
T = TypeVar("T")


class Caller:
    """A thread that makes one call after the other. A result costs one turn of the event loop, where an executor takes two."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = SimpleQueue()
        self._thread = Thread(target=self._make_calls, name=name, daemon=True)
        self._thread.start()

    async def call(self, fn: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Return what `fn` returns. Who is cancelled meanwhile does not stop it."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.put((partial(fn, *args, **options), done))
        return await done

    def end(self) -> None:
        """Make the calls that wait, and end."""
        self._calls.put(None)
        self._thread.join()

    def _make_calls(self) -> None:
        while (waiting := self._calls.get()) is not None:
            call, done = waiting
            result, error = None, None
            try:
                result = call()
            except BaseException as raised:  # noqa: BLE001 - it is the caller's, and raised there
                error = raised
            with suppress(RuntimeError):  # the loop has been closed: nobody waits any more
                done.get_loop().call_soon_threadsafe(_tell, done, result, error)
            del waiting, call, done, result, error


def _tell(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(result)
    elif isinstance(error, StopIteration):  # which no future takes: who waits would wait for ever
        done.set_exception(RuntimeError(f"the call raised {error!r}"))
    else:
        done.set_exception(error)


class ThreadConnection(AsyncConnection):
    """A connection inside a transaction. Streams and savepoints are not offered."""

    def __init__(self, engine: AsyncEngine, connection: Connection, thread: Caller) -> None:
        super().__init__(engine, connection)
        self._connection = connection
        self._thread = thread

    async def run_sync(self, fn: Callable[Concatenate[Connection, P], T], *args: P.args, **options: P.kwargs) -> T:
        """Return what `fn(connection, …)` returns, called in the thread; results of queries must be read there."""
        return await self._thread.call(fn, self._connection, *args, **options)

    async def execute(self, statement: Any, parameters: Any = None, **options: Any) -> CursorResult[Any]:
        """Return the result of one statement, read to its end."""
        return await self.run_sync(_execute_and_read, statement, parameters, **options)


class SqliteThread:
    """The thread and its connection. `writing` is one transaction; who calls it sees to it that there is one at a time."""

    def __init__(self, engine: Engine, as_engine: AsyncEngine) -> None:
        self._engine = engine
        self._as_engine = as_engine
        self._thread: Caller | None = None
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
            await asyncio.shield(connection.run_sync(_roll_back))
            raise

    async def write(self, fn: Callable[Concatenate[Connection, P], T], *args: P.args, **options: P.kwargs) -> T:
        """Return what `fn(connection, …)` returns, called and committed in the thread in one go."""
        connection = await self._opened()
        return await connection.run_sync(lambda opened: _committed(opened, fn, *args, **options))

    async def _opened(self) -> ThreadConnection:
        if self._connection is None:
            self._thread = self._thread or Caller("sqlite writer")
            self._connection = ThreadConnection(self._as_engine, await self._thread.call(self._engine.connect), self._thread)
        return self._connection

    async def close(self) -> None:
        """End the thread and close the connection."""
        if self._connection is not None:
            await self._connection.run_sync(Connection.close)
            self._connection = None
        self._engine.dispose()
        if self._thread is not None:
            self._thread.end()
            self._thread = None


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
    # A COMMIT that was refused ends the transaction for SQLAlchemy and not for SQLite: it would stay open, and the next one's
    # rows be committed by nobody.
    with suppress(sqlite3.Error):  # the next BEGIN says so too
        connection.connection.rollback()


def _execute_and_read(connection: Connection, /, statement: Any, parameters: Any, **options: Any) -> Any:
    result = connection.execute(statement, parameters, **options)
    return result.freeze()() if result.returns_rows else result
