"""A process with many open files: new ones get numbers that `select.select` does not take."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

SELECT_FILES = 1024
"""FD_SETSIZE of every C library that we run on."""


@contextmanager
def every_low_number_taken() -> Iterator[None]:
    """Inside, a file that is opened has a number of at least `SELECT_FILES`."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while taken[-1] < SELECT_FILES:
            taken.append(os.dup(taken[0]))
        yield
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
