"""Makes Python's full garbage collections rare while an engine runs in the process of a script. Knows no engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OLDER_PER_FULL = 100
"""Collections of the middle generation for a full one, instead of Python's 10; one comes after some 7,000 new objects."""


@contextmanager
def rare_full_collections() -> Iterator[None]:
    """Make full collections ten times rarer within the block.

    Steps make many small objects that live for a while, which triggers full collections. One over all the objects of torch and
    the script takes as long as fifty steps of a small model. Without any, cycles that a script drops between its calls would
    never be freed. Nothing changes if the script has made them as rare itself, or while another thread is in such a block.
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
