"""Delays Ctrl-C to the end of an engine step: a step that is half applied cannot be undone.

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
    """Within the block, delay an interrupt until the yielded function is called or the block ends. A second one is not delayed.

    Then the previous handler runs. Nothing changes if that is not a Python function, or outside of the main
    thread, which interrupts never reach.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None
        return
    pending: list[int] = []

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        pending.append(number)
        if len(pending) > 1:
            handler(number, frame)

    def deliver() -> None:
        if pending:
            pending.clear()
            handler(signal.SIGINT, None)

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield deliver
    finally:
        signal.signal(signal.SIGINT, handler)
    deliver()
