"""A SQLite connection in a dedicated thread: a transaction of any number of statements costs one event-loop iteration.

The asyncio driver switches to its thread and back several times per statement, which is too slow for many transactions a second
of many statements each. Independent of tables and locks.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine

P = ParamSpec("P")
T = TypeVar("T")


class CallThread:
    """A thread that runs calls one after the other. A result costs one event-loop iteration; with an executor, two."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = SimpleQueue()
        self._thread = Thread(target=self._make_calls, name=name, daemon=True)
        self._thread.start()

    async def call(self, fn: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Run `fn` in the thread and return its result. Cancelling the caller does not stop it."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.put((partial(fn, *args, **options), done))
        return await done

    def end(self) -> None:
        """Stop the thread after the waiting calls."""
        self._calls.put(None)
        self._thread.join()

    def _make_calls(self) -> None:
        while (waiting := self._calls.get()) is not None:
            call, done = waiting
            result, error = None, None
            try:
                result = call()
            except BaseException as raised:  # noqa: BLE001 - raised in the caller
                error = raised
            with suppress(RuntimeError):  # the loop is closed: no callers are waiting
                done.get_loop().call_soon_threadsafe(_resolve, done, result, error)
            del waiting, call, done, result, error


def _resolve(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(result)
    elif isinstance(error, StopIteration):  # futures reject it, and the caller would wait for ever
        done.set_exception(RuntimeError(f"the call raised {error!r}"))
    else:
        done.set_exception(error)


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
