"""How Python is set up in a process that serves: what its garbage collector visits, and how soon a waiting thread runs.

A full collection visits every object, most of which (modules, routes, schemas) live as long as the process; under load one ran
every few seconds and stopped every stream for 150 ms. And a thread that wants to run waits for the one that runs, by default up
to 5 ms each time: the ledger's thread asks several times per commit.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_OBJECTS_MAX = 1_000  # of a collection of the youngest: a millisecond, in which every stream waits
YOUNG_PER_OLDER = 10
OLDER_PER_FULL = 100
SWITCH_INTERVAL_S = 0.0005


def prepare_to_serve() -> None:
    """Exempt what exists now from collections, and set the intervals. Call it once, when all that stays has been made."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX, YOUNG_PER_OLDER, OLDER_PER_FULL)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect nothing inside the block: a text of millions of lists is read many times as fast if they are not visited again
    for every thousand new ones. Nothing may be awaited within."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
