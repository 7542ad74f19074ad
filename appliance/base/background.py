"""A task that an object owns: started, stopped, and logged if it fails in between; and work that is repeated in such a task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn

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


async def repeat(
    work: Callable[[], Awaitable[object]],
    every_s: float,
    *,
    failure: str,
    immediately: bool = False,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> NoReturn:
    """Do `work` for ever, `every_s` seconds after its last end; the first time after as long, or `immediately`.

    An error of `work` is logged as `failure`, and it is done again in time.
    """
    if not immediately:
        await sleep(every_s)
    while True:
        try:
            await work()
        except Exception:  # owned task: a database that is away for a moment must not end it
            log.exception(failure)
        await sleep(every_s)
