"""Memory for which the system is asked to use pages of megabytes, if it has them.

A step reads every weight once. With pages of 4 kB the processor has to look up the address of the next page after every 64
lines, in a virtual machine through two tables.

A large page is created when it is first written to, and only if all of it was requested before. Memory that a tensor had
before, or tensors that each request their own and end in the middle of a page, stay on small pages, which the system merges
only gradually: two thirds of a 100M model, at 16 MB in ten seconds. So tensors are placed one after another in pieces of fresh
memory, each requested as a whole. Memory of freed tensors that the C library keeps, such as those that have been packed, is
returned before each new piece, so a model is never in memory twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading

import torch

PIECE_BYTES = 64 << 20
PAGE_BYTES = 2 << 20
LINE_BYTES = 64

_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)


class Pieces:
    """Hands out memory in the order of requests. A piece lives as long as the last tensor in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """[size] uint8, not initialised, aligned to a cache line."""
        if size > PIECE_BYTES // 2:
            return _piece(size)[:size]
        taken = -(-size // LINE_BYTES) * LINE_BYTES
        with self._lock:
            if taken > self._rest.numel():
                self._rest = _piece(PIECE_BYTES)
            found, self._rest = self._rest[:size], self._rest[taken:]
        return found


def _piece(size: int) -> torch.Tensor:
    """At least `size` fresh bytes, aligned to a large page."""
    if _ADVICE is None:
        return torch.empty(size, dtype=torch.uint8)
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only in glibc
    if give_back is not None:
        give_back(0)
    whole = -(-size // PAGE_BYTES) * PAGE_BYTES
    memory = mmap.mmap(-1, whole + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system built without large pages
        memory.madvise(_ADVICE)
    piece = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory alive
    return piece[-piece.data_ptr() % PAGE_BYTES :][:whole]


_pieces = Pieces()


def on_large_pages(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An uninitialised tensor on the CPU, for data with the same lifetime as its neighbours: a piece is freed as a whole."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return _pieces.take(size).view(dtype).view(shape)
