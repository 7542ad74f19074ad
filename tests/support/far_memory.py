"""Tensors whose elements are more than 2³¹ beyond their start, where 32-bit offsets overflow. Only pages that are touched take
memory."""

from __future__ import annotations

import math
import mmap

import torch

FAR = 2**31
MAP_NORESERVE = 0x4000  # of Linux: no swap is reserved for pages that are not touched


def untouched(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Like `torch.empty`, of any size: memory is taken page by page. An index that overflows reads zeros before it."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    flags, before = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, FAR * dtype.itemsize
    memory = mmap.mmap(-1, before + math.prod(shape) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=torch.uint8, offset=before).view(dtype).view(shape)


def far_blocks(blocks: torch.Tensor) -> tuple[torch.Tensor, int]:
    """→ a cache that ends with these blocks, all of them beyond FAR elements, and the number of the first"""
    first = FAR // blocks[0].numel() + 1
    cache = untouched(first + blocks.shape[0], *blocks.shape[1:], dtype=blocks.dtype, device=blocks.device)
    cache[first:] = blocks
    return cache, first
