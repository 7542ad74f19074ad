"""Copies of whole KV blocks: within the cache, and through a staging buffer in which all layers of a block are contiguous."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_blocks(caches: Sequence[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy blocks within the caches: one [N, ...] per layer.

    sources, targets: [n] int64 block ids; no target is a source of another pair
    """
    for cache in caches:
        blocks = indexable(cache)
        blocks.index_copy_(0, targets, blocks.index_select(0, sources))


def gather_blocks(caches: Sequence[torch.Tensor], blocks: torch.Tensor, staging: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy block `blocks[i]` of every layer to staging[rows[i]]. staging: [R, layers, ...one block], rows: [n] int64."""
    for layer, cache in enumerate(caches):
        indexable(staging[:, layer]).index_copy_(0, rows, indexable(cache).index_select(0, blocks))


def scatter_blocks(caches: Sequence[torch.Tensor], blocks: torch.Tensor, staging: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy staging[rows[i]] back to block `blocks[i]` of every layer."""
    for layer, cache in enumerate(caches):
        indexable(cache).index_copy_(0, blocks, indexable(staging[:, layer]).index_select(0, rows))


def indexable(blocks: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that torch can index: e4m3 has no indexing."""
    return blocks.view(torch.uint8) if blocks.dtype.itemsize == 1 else blocks
