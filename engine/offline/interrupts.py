"""Ctrl-C between two steps of an engine, and not within one: what a step has booked half of nobody takes back.

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
    """Inside, an interrupt waits until the function that this gives is called, or for the end; a second one does not wait.

    What an interrupt does is the handler's that was there before. Nothing changes where that is none of Python's, and outside
    of the main thread, which interrupts never reach.
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
