"""Makes starting threads fail, as in a container at its process limit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def forbid_new_threads() -> Iterator[None]:
    """Inside the block no thread can be started; running threads continue."""
    with mock.patch.object(threading, "_start_new_thread", side_effect=RuntimeError("can't start new thread")):
        yield
