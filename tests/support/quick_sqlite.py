"""SQLite in the thread that asks: aiosqlite hands each call to a thread and is handed its result, which takes longer than both.

Whoever runs beside comes in between, as there. What may wait for another transaction still does so in the connection's thread,
or who is to end that one would never come to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import aiosqlite

WAITING = "BEGIN IMMEDIATE"
_in_its_thread: Callable[..., Any] = aiosqlite.Connection._execute
_busy: set[aiosqlite.Connection] = set()
"""Those whose thread has something to do, from which a cancelled task may have gone away."""


async def _execute(connection: aiosqlite.Connection, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """In the place of `aiosqlite.Connection._execute`."""
    if connection in _busy or args[:1] == (WAITING,):
        _busy.add(connection)
        return await _in_its_thread(connection, partial(_last, connection), fn, *args, **options)
    if not connection._running or connection._connection is None:
        raise ValueError("Connection closed")
    try:
        return fn(*args, **options)
    finally:
        await asyncio.sleep(0)


def _last(connection: aiosqlite.Connection, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What the thread does; then it may have nothing to do any more."""
    try:
        return fn(*args, **options)
    finally:
        if connection._tx.empty():
            _busy.discard(connection)


@contextmanager
def in_the_thread_that_asks() -> Iterator[None]:
    """Let all connections that are opened do so."""
    opened_for_all = partial(aiosqlite.connect, check_same_thread=False)
    with mock.patch.object(aiosqlite, "connect", opened_for_all), mock.patch.object(aiosqlite.Connection, "_execute", _execute):
        yield
