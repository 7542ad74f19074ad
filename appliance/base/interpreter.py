"""Tuning of the Python interpreter in a serving process: garbage collection and the thread switch interval.

A full collection visits every object, most of which (modules, routes, schemas) live as long as the process; under load one ran
every few seconds and paused every stream for 150 ms. And a thread waits for the interpreter lock for up to 5 ms by default,
which the ledger's thread requests several times per commit.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_OBJECTS_MAX = 1_000  # per young collection: pauses every stream for about a millisecond
YOUNG_PER_OLDER = 10
OLDER_PER_FULL = 100
SWITCH_INTERVAL_S = 0.0005


def prepare_to_serve() -> None:
    """Exempt all existing objects from collection and set the intervals. Call once all long-lived objects are created."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX, YOUNG_PER_OLDER, OLDER_PER_FULL)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable garbage collection inside the block, which makes parsing millions of lists many times faster: they are not
    visited again for every thousand new ones. Do not await inside the block."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
