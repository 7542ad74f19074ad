"""Background tasks owned by an object (started, stopped, failures logged), and a loop that repeats work in such a task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn

import structlog

from appliance.base.consecutive_failures import ConsecutiveFailures

log = structlog.get_logger()


class Background:
    """Runs `run()` in a task called `name` between `start` and `stop`.

    An exception from `run` is logged when it is raised, because nobody awaits the task. `stop` raises nothing, so that a
    shutdown sequence continues with the objects after this one.
    """

    def __init__(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._name = name
        self._run = run
        self._task: asyncio.Task[None] | None = None

    @property
    def started(self) -> bool:
        """Return whether it has been started and not stopped since, even if its task has failed."""
        return self._task is not None

    def start(self) -> None:
        """Start the task in the running event loop. Call once before each `stop`."""
        assert self._task is None, f"{self._name} is already started"
        self._task = asyncio.create_task(self._run(), name=self._name)
        self._task.add_done_callback(self._on_done)

    async def stop(self) -> None:
        """Cancel the task and wait until it has ended. Does nothing if it was not started."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    def _on_done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("background task failed", task=self._name, exc_info=error)


async def repeat(
    work: Callable[[], Awaitable[object]],
    every_s: float,
    *,
    failure: str,
    immediately: bool = False,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> NoReturn:
    """Run `work` for ever with `every_s` seconds between runs, the first one after `every_s` or `immediately`.

    An exception from `work` is logged under the event name `failure`, and the loop continues. If it persists, it is logged once
    a minute, and its end is logged too.
    """
    failures = ConsecutiveFailures()
    if not immediately:
        await sleep(every_s)
    while True:
        try:
            await work()
        except Exception:  # owned task: a short outage of the database must not end it
            if number := failures.count():
                log.exception(failure, failures=number)
        else:
            if number := failures.end():
                log.warning("works again", after=failure, failures=number)
        await sleep(every_s)
