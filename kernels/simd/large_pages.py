"""Memory for which the operating system is asked to use large pages, of megabytes, if it has them.

A step reads every weight once. With pages of 4 kB the processor has to look up the address of the next page after every 64
lines, in a virtual machine through two tables.

A large page is created when it is first written to, and only if large pages were requested for all of it before. Memory that a
tensor used before, and tensors that each request their own and end in the middle of a page, stay on small pages, which the
system merges only gradually: two thirds of a 100M model, at 16 MB in ten seconds. So tensors are placed one after another in
chunks of fresh memory, and large pages are requested for each chunk as a whole. Memory of freed tensors that the C library
keeps, such as those that have been packed, is returned before each new chunk, so a model is never in memory twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading

import torch

CHUNK_BYTES = 64 << 20
PAGE_BYTES = 2 << 20
LINE_BYTES = 64

_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)


class BumpAllocator:
    """Allocates memory from chunks, one request after another. A chunk lives as long as the last tensor in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = torch.empty(0, dtype=torch.uint8)

    def allocate(self, size: int) -> torch.Tensor:
        """[size] uint8, not initialised, aligned to a cache line."""
        if size > CHUNK_BYTES // 2:
            return _map_chunk(size)[:size]
        aligned_size = -(-size // LINE_BYTES) * LINE_BYTES
        with self._lock:
            if aligned_size > self._free.numel():
                self._free = _map_chunk(CHUNK_BYTES)
            allocated, self._free = self._free[:size], self._free[aligned_size:]
        return allocated


def _map_chunk(size: int) -> torch.Tensor:
    """At least `size` fresh bytes, aligned to a large page."""
    if _MADV_HUGEPAGE is None:
        return torch.empty(size, dtype=torch.uint8)
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only in glibc
    if malloc_trim is not None:
        malloc_trim(0)
    num_bytes = -(-size // PAGE_BYTES) * PAGE_BYTES
    memory = mmap.mmap(-1, num_bytes + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system built without large pages
        memory.madvise(_MADV_HUGEPAGE)
    chunk = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory alive
    return chunk[-chunk.data_ptr() % PAGE_BYTES :][:num_bytes]


_allocator = BumpAllocator()


def on_large_pages(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An uninitialised tensor on the CPU, for data with the same lifetime as its neighbours: a chunk is freed as a whole."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return _allocator.allocate(size).view(dtype).view(shape)
