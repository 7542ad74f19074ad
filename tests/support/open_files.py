"""Opens so many files that new descriptors are too large for `select.select`."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

FD_SETSIZE = 1024
"""Its value in every C library that we run on."""


@contextmanager
def use_up_low_descriptors() -> Iterator[None]:
    """Inside the block, new file descriptors are at least `FD_SETSIZE`."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while taken[-1] < FD_SETSIZE:
            taken.append(os.dup(taken[0]))
        yield
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
