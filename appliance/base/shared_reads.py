"""Reads that callers share: one read serves all who ask for the same key while it runs.

A read runs in a task of its own, so a caller that is cancelled ends only its own wait. On PostgreSQL, cancelling a query would
also keep its connection busy until the server has answered a second, new connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SharedReads(Generic[K, V]):
    """Reads that are running, by key. Whatever must not be served by a read begun earlier belongs in the key, such as the
    number of changes so far."""

    def __init__(self) -> None:
        self._running: dict[K, asyncio.Task[V]] = {}

    async def get(self, key: K, read: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """Return the result of `read`, or of the read of this key that is running. Raises its error."""
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(self._run(key, read), name="shared read")
            task.add_done_callback(_retrieve_error)
        return await asyncio.shield(task)

    async def _run(self, key: K, read: Callable[[], Coroutine[Any, Any, V]]) -> V:
        try:
            return await read()
        finally:
            del self._running[key]


def _retrieve_error(task: asyncio.Task[Any]) -> None:
    """Mark an error as retrieved: perhaps every caller has left."""
    if not task.cancelled():
        task.exception()
