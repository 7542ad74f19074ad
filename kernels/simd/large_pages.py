"""Memory that the system is asked to hold in pages of megabytes, where it has them.

A step reads every weight once. In pages of 4 kB the processor looks up where the next one lies as often as it has read 64
lines, in a virtual machine through two tables: pages of 2 MB gave a product of one row an eighth more of what memory can
give, one of sixteen a thirtieth.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from functools import cache

import torch

_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)


def on_large_pages(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An uninitialised tensor on the CPU."""
    made = torch.empty(shape, dtype=dtype)
    first = -(-made.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (made.data_ptr() + made.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    advise = _madvise()
    if advise is not None and size > 0:
        advise(first, size, _ADVICE)
    return made


@cache
def _madvise() -> Callable[..., int] | None:
    """The system's call, whose refusal changes nothing; None where there is no such advice."""
    if _ADVICE is None:
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
