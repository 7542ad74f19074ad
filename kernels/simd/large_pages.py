"""Memory that the system is asked to hold in pages of megabytes, where it has them.

A step reads every weight once. In pages of 4 kB the processor looks up where the next one lies as often as it has read 64
lines, in a virtual machine through two tables.

A large page is made when a number of it is first written, and only if all of it was asked for before. Memory that a tensor
had before, or tensors that each ask for themselves and end in the middle of a page, stay on small ones, which the system
puts together at its leisure: two thirds of a 100M model, at 16 MB in ten seconds. So tensors are laid one behind another in
pieces of fresh memory, each of which is asked for at once. What the C library keeps of freed tensors, as those whose numbers
have been packed, is given back before each piece: there are never two of a model.
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
    """Hands out memory in the order in which it is asked for. A piece lives as long as the last tensor in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """[size] uint8, not initialised, at a cache line's beginning."""
        if size > PIECE_BYTES // 2:
            return _piece(size)[:size]
        taken = -(-size // LINE_BYTES) * LINE_BYTES
        with self._lock:
            if taken > self._rest.numel():
                self._rest = _piece(PIECE_BYTES)
            found, self._rest = self._rest[:size], self._rest[taken:]
        return found


def _piece(size: int) -> torch.Tensor:
    """At least `size` bytes that nobody has written to, from the beginning of a large page."""
    if _ADVICE is None:
        return torch.empty(size, dtype=torch.uint8)
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
    if give_back is not None:
        give_back(0)
    whole = -(-size // PAGE_BYTES) * PAGE_BYTES
    memory = mmap.mmap(-1, whole + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # of a system built without large pages
        memory.madvise(_ADVICE)
    piece = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory
    return piece[-piece.data_ptr() % PAGE_BYTES :][:whole]


_pieces = Pieces()


def on_large_pages(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An uninitialised tensor on the CPU, for what lives as long as its neighbours: a piece is given back as a whole."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return _pieces.take(size).view(dtype).view(shape)
