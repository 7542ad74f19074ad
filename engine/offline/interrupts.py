"""Ctrl-C between two steps of an engine and not within one: a step that is half booked cannot be undone.

Knows no engine and no torch.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def between_steps() -> Iterator[Callable[[], None]]:
    """Inside, an interrupt waits until the yielded function is called, or until the block ends. A second one does not wait.

    The handler that was there before then runs. Nothing changes if that is not a Python function, or outside of the main
    thread, which interrupts never reach.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None
        return
    waiting: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        waiting.append(number)
        if len(waiting) > 1:
            handler(number, frame)

    def look() -> None:
        if waiting:
            waiting.clear()
            handler(signal.SIGINT, None)

    signal.signal(signal.SIGINT, note)
    try:
        yield look
    finally:
        signal.signal(signal.SIGINT, handler)
    look()
