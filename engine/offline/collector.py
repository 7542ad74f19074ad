"""How often Python's collector looks through all there is while an engine runs in the process of a script. Knows no engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OLDER_PER_FULL = 100
"""Collections of older objects for a full one, of which Python makes one for ten: each stands for some 7,000 new objects."""


@contextmanager
def rare_full_collections() -> Iterator[None]:
    """Inside, the collector looks through all objects a tenth as often.

    Steps make many small objects that live for a while, which makes full collections due; one over all that torch and the
    script keep takes as long as fifty steps of a small model. Without any, cycles that a script drops between its calls would
    stay for ever. Nothing changes where the script wants them as rarely, or another thread is inside.
    """
    young, older, full = gc.get_threshold()
    if full >= OLDER_PER_FULL:
        yield
        return
    gc.set_threshold(young, older, OLDER_PER_FULL)
    try:
        yield
    finally:
        gc.set_threshold(young, older, full)
