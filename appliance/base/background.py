"""A task that an object owns: started, stopped, and heard of when it fails in between. Knows no part by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

log = structlog.get_logger()


class Background:
    """Runs `run()` in a task called `name` between `start` and `stop`.

    An error that `run` lets through is logged when it happens: nobody awaits the task, and `stop` raises nothing, so that
    what is stopped after it is stopped too.
    """

    def __init__(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._name = name
        self._run = run
        self._task: asyncio.Task[None] | None = None

    @property
    def started(self) -> bool:
        """Return whether it was started and not stopped since, even if its task has failed."""
        return self._task is not None

    def start(self) -> None:
        """Start the task in the running event loop. It is started once before each `stop`."""
        assert self._task is None, f"{self._name} is started once"
        self._task = asyncio.create_task(self._run(), name=self._name)
        self._task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Cancel the task and return when it has ended; at once when there is none."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("a background task ended by an error", task=self._name, exc_info=error)
