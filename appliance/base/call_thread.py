"""Runs calls that may block in a thread of their own. Unlike those of an executor, it does not keep the process alive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, ParamSpec, TypeVar

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

    def end(self, *, wait: bool = True) -> None:
        """Stop the thread after the waiting calls, and wait for that, unless one of them may never return."""
        self._calls.put(None)
        if wait:
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
