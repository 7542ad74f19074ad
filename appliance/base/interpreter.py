"""How Python is set up in a process that serves: what its collector looks through, and how soon a thread has its turn.

A full collection goes through all that is there, most of which (modules, routes, schemas) lives as long as the process; under
load one came every few seconds, and every stream stood still for 150 ms meanwhile. And a thread that wants to run waits for the
one that runs, by default for up to 5 ms each time: the ledger's thread asks several times per commit.
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
    """Call it once, when everything has been made that stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX, YOUNG_PER_OLDER, OLDER_PER_FULL)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect nothing meanwhile: a text of millions of lists is read many times as fast where none of them is looked at again
    with every thousand that come. Nothing may be awaited within."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
