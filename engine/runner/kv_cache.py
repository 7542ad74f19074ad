"""The paged key/value tensors, one per layer, [N, P, 2, K, D], and their twins in host memory.

Keys and values of a token lie together, so that one gather reads and one scatter writes both, and a block of a layer is one
contiguous piece of memory. Separate key and value pools, as other kernels want them, are strided views of it.

A block id means the same slots in every tensor here, those of a draft model included: one block table, one reference
count and one move serve all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from engine.config.model import ModelConfig
from engine.errors import EngineConfigError
from engine.scheduling.scheduled_batch import BlockMoves


def allocate_kv_cache(
    config: ModelConfig, num_blocks: int, block_size: int, *, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """One zeroed tensor per layer; pages are touched here and not by the first request. Raises `EngineConfigError` when there
    is no memory for them."""
    shape = (num_blocks, block_size, 2, config.num_kv_heads, config.head_dim)
    try:
        return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
    except RuntimeError as error:  # of the allocator, whose message may run over many lines
        num_bytes = math.prod(shape) * dtype.itemsize * config.num_layers
        reason = str(error).partition("\n")[0]
        raise EngineConfigError("kv_cache_bytes", f"({num_bytes}) cannot be allocated; lower it: {reason}") from error


class BlockMover:
    """Moves whole blocks of all `caches` at once: to and from a tier of `num_host_blocks` in main memory, and on the device.

    The host tier is page-locked when the caches are on a GPU, so that transfers run at the speed of the bus. Its pages are
    touched by the first block that comes, so an unused tier costs address space only where memory need not be locked.
    """

    def __init__(self, caches: Sequence[torch.Tensor], num_host_blocks: int) -> None:
        # torch does not index 8-bit floats; a move does not care what the bytes mean.
        self._caches = [cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache for cache in caches]
        self._host = [
            torch.empty((num_host_blocks, *cache.shape[1:]), dtype=cache.dtype, pin_memory=cache.is_cuda)
            for cache in self._caches
        ]

    def move(self, moves: BlockMoves) -> None:
        """First out, then in, then copies; when it returns, all of it has happened. A repeated call does no harm, because
        nothing that is read here is written by a later kind of move of the same step."""
        self.swap_out(moves.swap_out)
        self.swap_in(moves.swap_in)
        self.copy(moves.copies)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """pairs: (device block, host block)"""
        if not pairs:
            return
        sources, targets = _columns(pairs)
        for cache, host in zip(self._caches, self._host, strict=True):
            host.index_copy_(0, targets, cache.index_select(0, sources.to(cache.device)).cpu())

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """pairs: (host block, device block)"""
        if not pairs:
            return
        sources, targets = _columns(pairs)
        for cache, host in zip(self._caches, self._host, strict=True):
            cache.index_copy_(0, targets.to(cache.device), host.index_select(0, sources).to(cache.device))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """pairs: (source, target), both on the device; no target is a source of another pair."""
        if not pairs:
            return
        sources, targets = _columns(pairs)
        for cache in self._caches:
            cache.index_copy_(0, targets.to(cache.device), cache.index_select(0, sources.to(cache.device)))


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    sources, targets = torch.tensor(pairs, dtype=torch.int64).unbind(1)
    return sources, targets
