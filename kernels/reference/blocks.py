"""Copies of whole KV blocks, one by one, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_blocks(caches: Sequence[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy blocks within the caches: one [N, ...] per layer.

    sources, targets: [n] int64 block ids; no target is a source of another pair
    """
    for cache in caches:
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            cache[target] = cache[source]


def gather_blocks(caches: Sequence[torch.Tensor], blocks: torch.Tensor, staging: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy block `blocks[i]` of every layer to staging[rows[i]]. staging: [R, layers, ...one block], rows: [n] int64."""
    for layer, cache in enumerate(caches):
        for block, row in zip(blocks.tolist(), rows.tolist(), strict=True):
            staging[row, layer] = cache[block]


def scatter_blocks(caches: Sequence[torch.Tensor], blocks: torch.Tensor, staging: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy staging[rows[i]] back to block `blocks[i]` of every layer."""
    for layer, cache in enumerate(caches):
        for block, row in zip(blocks.tolist(), rows.tolist(), strict=True):
            cache[block] = staging[row, layer]
