"""Threads with a stack of a known size: the library recurses over a grammar, and a stack overflow kills the process.

A grammar that the worker could build on a stack of `WORKER_STACK_BYTES` is built again in the engine on `STACK_BYTES`, whatever
limits the process was started with.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

WORKER_STACK_BYTES = 4 * 1024**2
STACK_BYTES = 4 * WORKER_STACK_BYTES
_SIZE = threading.Lock()


@contextmanager
def thread_stack_size(stack_bytes: int) -> Iterator[None]:
    """Threads started inside the context have a stack of `stack_bytes`."""
    with _SIZE:  # the size is a setting of the whole process
        before = threading.stack_size(stack_bytes)
        try:
            yield
        finally:
            threading.stack_size(before)
