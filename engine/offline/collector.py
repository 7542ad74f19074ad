"""What Python's collector looks through while an engine runs in the process of a script. Knows no engine and no torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_new_objects() -> Iterator[None]:
    """Inside, the collector looks through objects that were made meanwhile, and through all of them again afterwards.

    Steps make many small objects that live for a while, which makes full collections due; one over all that torch and the
    script keep takes as long as fifty steps of a small model. Objects that somebody else has frozen stay so.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
