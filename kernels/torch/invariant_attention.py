"""Paged attention whose result for a query depends only on the query's own context and position.

Queries are processed in tiles aligned to positions: tile j holds positions j·Q … j·Q + Q − 1 of one request, whether one of
them is computed in this step or all, and sees keys up to the end of the tile, behind a mask. So the shapes, and with them the
order of additions inside the library, are functions of a query's position. How a prompt was cut into chunks, which rows are in
the batch and where its prefix came from make no difference. Missing queries and keys of a tile are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from kernels.attention_rows import AttentionRow, AttentionShape
from kernels.torch.fp8_decode import decode_kv
from kernels.torch.gathered_attention import capped_scores

QUERY_TILE = 8
"""Positions of a tile: a decode pays for all of them; a prefill pays one call per tile."""


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Queries `first` … `end` - 1 of the batch are at `offset` and after in the tile; of the row's gathered keys `keys_first` …
    `keys_end` - 1 are visible under `mask`, [heads per key head · Q, keys] in the format of the scores."""

    first: int
    end: int
    offset: int
    keys_first: int
    keys_end: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class TiledRow:
    """One row of the batch with its blocks; `num_keys` of their slots hold the context, `padded_keys` is the space for keys."""

    blocks: torch.Tensor  # [M] int64
    num_keys: int
    padded_keys: int
    tiles: list[QueryTile]


@dataclass(frozen=True, slots=True)
class InvariantPlan:
    """Index tensors and masks of one step, the same for all layers."""

    shape: AttentionShape
    rows: list[TiledRow]


class InvariantPlanner:
    """The planner of batch-invariant engines, used instead of `GatheredPlanner`."""

    def __init__(self, shape: AttentionShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        self._mask_dtype = torch.float32 if shape.softcap is not None else dtype
        self._device = device

    def plan(self, rows: Sequence[AttentionRow]) -> InvariantPlan:
        planned, token = [], 0
        for row in rows:
            planned.append(self._row(row, token))
            token += row.query_len
        return InvariantPlan(self._shape, planned)

    def _row(self, row: AttentionRow, token: int) -> TiledRow:
        size = self._shape.block_size
        first_tile, end_tile = row.start // QUERY_TILE, -(-row.context_len // QUERY_TILE)
        first_block = self._first_key(first_tile) // size
        keys_offset = first_block * size
        tiles = []
        for tile in range(first_tile, end_tile):
            first = max(row.start, tile * QUERY_TILE)
            end = min(row.context_len, (tile + 1) * QUERY_TILE)
            tiles.append(
                QueryTile(
                    first=token + first - row.start,
                    end=token + end - row.start,
                    offset=first - tile * QUERY_TILE,
                    keys_first=self._first_key(tile) - keys_offset,
                    keys_end=(tile + 1) * QUERY_TILE - keys_offset,
                    mask=self._mask(tile),
                )
            )
        blocks = torch.from_numpy(np.array(row.block_table[first_block : -(-row.context_len // size)], dtype=np.int64))
        return TiledRow(blocks.to(self._device), row.context_len - keys_offset, end_tile * QUERY_TILE - keys_offset, tiles)

    def _first_key(self, tile: int) -> int:
        """The first key that the tile sees: the beginning of its first query's window, rounded down to a tile."""
        window = self._shape.sliding_window
        return 0 if window is None else max(0, tile * QUERY_TILE + 1 - window) // QUERY_TILE * QUERY_TILE

    def _mask(self, tile: int) -> torch.Tensor:
        queries = torch.arange(tile * QUERY_TILE, (tile + 1) * QUERY_TILE)[:, None]
        keys = torch.arange(self._first_key(tile), (tile + 1) * QUERY_TILE)[None, :]
        visible = keys <= queries
        if self._shape.sliding_window is not None:
            visible &= keys > queries - self._shape.sliding_window
        mask = torch.zeros(visible.shape, dtype=self._mask_dtype).masked_fill_(~visible, float("-inf"))
        return mask.repeat(self._shape.group, 1).to(self._device)


def invariant_attention(
    qkv: torch.Tensor, kv_cache: torch.Tensor, plan: InvariantPlan, kv_scales: torch.Tensor | None
) -> torch.Tensor:
    """Attention of the rows of a plan, tile by tile.

    qkv: [T, H+2K, D] rotated, kv_cache: [N, P, 2, K, D] already written → [T, H, D]; kv_scales: [2] of a cache in e4m3
    """
    shape = plan.shape
    out = torch.empty(qkv.shape[0], shape.num_heads, shape.head_dim, dtype=qkv.dtype, device=qkv.device)
    for row in plan.rows:
        context_slots = kv_cache.index_select(0, row.blocks).flatten(0, 1)[: row.num_keys]
        if context_slots.dtype is not qkv.dtype:
            context_slots = decode_kv(context_slots, qkv.dtype, kv_scales)
        slots = context_slots.new_zeros(row.padded_keys, *context_slots.shape[1:])
        slots[: row.num_keys] = context_slots
        for tile in row.tiles:
            _attend_tile(qkv, slots[tile.keys_first : tile.keys_end], shape, tile, out)
    return out


def _attend_tile(qkv: torch.Tensor, slots: torch.Tensor, shape: AttentionShape, tile: QueryTile, out: torch.Tensor) -> None:
    """slots: [C, 2, K, D]; the query heads of one key head are stacked: [K, H/K · Q, D]"""
    kv_heads, size = shape.num_kv_heads, shape.head_dim
    queries = qkv.new_zeros(QUERY_TILE, shape.num_heads, size)
    count = tile.end - tile.first
    queries[tile.offset : tile.offset + count] = qkv[tile.first : tile.end, : shape.num_heads]
    stacked = queries.transpose(0, 1).reshape(1, kv_heads, -1, size)
    keys, values = slots[:, 0].transpose(0, 1).unsqueeze(0), slots[:, 1].transpose(0, 1).unsqueeze(0)
    if shape.softcap is None:
        attended = functional.scaled_dot_product_attention(stacked, keys, values, attn_mask=tile.mask, scale=shape.scale)
    else:
        scores = capped_scores(stacked @ keys.transpose(-1, -2), shape)
        attended = scores.add_(tile.mask).softmax(dim=-1).to(values.dtype) @ values
    heads_first = attended.view(shape.num_heads, QUERY_TILE, size)
    out[tile.first : tile.end] = heads_first[:, tile.offset : tile.offset + count].transpose(0, 1)
