"""The paged key/value tensors, one per layer, [N, P, 2, K, D], and their twins in host memory.

Keys and values of a token are adjacent, so that one gather reads and one scatter writes both, and a block of a layer is one
contiguous piece of memory. Separate key and value pools, as other kernels require them, are strided views of it.

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
from kernels import ops


def allocate_kv_cache(
    config: ModelConfig, num_blocks: int, block_size: int, *, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """One zeroed tensor per layer; pages are touched here and not by the first request. Raises `EngineConfigError` when there
    is no memory for them."""
    shape = (num_blocks, block_size, 2, config.num_kv_heads, config.head_dim)
    try:
        return [ops.lasting_zeros(*shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
    except (RuntimeError, OSError, OverflowError) as error:  # of the allocator, whose message may run over many lines
        num_bytes = math.prod(shape) * dtype.itemsize * config.num_layers
        reason = str(error).partition("\n")[0]
        raise EngineConfigError("kv_cache_bytes", f"({num_bytes}) cannot be allocated; lower it: {reason}") from error


def _host_tier(caches: Sequence[torch.Tensor], num_blocks: int) -> torch.Tensor:
    """[num_blocks, layers, P, 2, K, D]. Raises `EngineConfigError` when there is no memory for it, or none to lock."""
    shape = (num_blocks, len(caches), *caches[0].shape[1:])
    try:
        return torch.empty(shape, dtype=caches[0].dtype, pin_memory=caches[0].is_cuda)
    except RuntimeError as error:
        num_bytes = math.prod(shape) * caches[0].itemsize
        locked = f" and locked (of locked memory torch takes {1 << (num_bytes - 1).bit_length()})" if caches[0].is_cuda else ""
        reason = str(error).partition("\n")[0]
        raise EngineConfigError("swap_space", f"({num_bytes} bytes) cannot be allocated{locked}; lower it: {reason}") from error


class BlockMover:
    """Moves whole blocks of all `caches` at once: to and from a tier of `num_host_blocks` in main memory, and on the device.

    The layers of a block are adjacent in the host tier, and a move is one launch for all layers of a model. The tier is
    page-locked when the caches are on a GPU, which writes to it and reads from it over the bus, in order with the steps: the
    host waits for nothing. Its pages are touched by the first block that comes, so an unused tier costs address space only
    where memory need not be locked.
    """

    def __init__(self, caches: Sequence[torch.Tensor], num_host_blocks: int) -> None:
        self._device = caches[0].device
        self._ops = ops.operations(self._device)
        kinds: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        for cache in caches:
            kinds.setdefault((cache.shape, cache.dtype), []).append(cache)
        self._kinds = list(kinds.values())  # those of a draft model are unlike the others
        self._host = [_host_tier(kind, num_host_blocks) for kind in self._kinds]

    def move(self, moves: BlockMoves) -> None:
        """Swap out, swap in, then copy, after every step launched before. Moves of one kind may be repeated by themselves: none
        of them writes what another one reads. With those of several kinds that is not so: a block that was swapped out may be
        the target of a swap in."""
        self.swap_out(moves.swap_out)
        self.swap_in(moves.swap_in)
        self.copy(moves.copies)

    def compile(self) -> None:
        """Have the kernels compiled that are compiled at their first use: copy the first block onto itself and, if there is a
        host tier, swap it out and in. There is nothing in them yet."""
        self.copy([(0, 0)])
        if len(self._host[0]):
            self.swap_out([(0, 0)])
            self.swap_in([(0, 0)])

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """pairs: (device block, host block)"""
        if pairs:
            sources, targets = self._columns(pairs)
            for caches, host in zip(self._kinds, self._host, strict=True):
                self._ops.gather_blocks(caches, sources, host, targets)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """pairs: (host block, device block)"""
        if pairs:
            sources, targets = self._columns(pairs)
            for caches, host in zip(self._kinds, self._host, strict=True):
                self._ops.scatter_blocks(caches, targets, host, sources)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """pairs: (source, target), both on the device; no target is a source of another pair."""
        if pairs:
            sources, targets = self._columns(pairs)
            for caches in self._kinds:
                self._ops.copy_blocks(caches, sources, targets)

    def _columns(self, pairs: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """pairs → two columns, [n] int64 each, on the device"""
        sent = ops.send([first for first, _ in pairs] + [second for _, second in pairs], torch.int64, self._device)
        return sent[: len(pairs)], sent[len(pairs) :]
