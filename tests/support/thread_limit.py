"""A process that gets no more threads, as where a container has as many processes as it may."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def forbid_new_threads() -> Iterator[None]:
    """Inside, no thread can be started; those that run go on."""
    with mock.patch.object(threading, "_start_new_thread", side_effect=RuntimeError("can't start new thread")):
        yield
