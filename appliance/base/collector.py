"""Python's garbage collector in a process that serves: what was made at the start is never looked through again.

Without this, every few seconds under load a full collection goes through all modules, routes and schemas, objects that live as
long as the process, and every stream stands still for 150 ms meanwhile.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS_MAX = 10_000  # of a collection of the youngest: a millisecond at most
COLLECTIONS_PER_OLDER = 20


def spare_what_is_there() -> None:
    """Call it once, when everything has been made that stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX, COLLECTIONS_PER_OLDER, COLLECTIONS_PER_OLDER)
