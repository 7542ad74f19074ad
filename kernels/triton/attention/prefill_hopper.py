"""Paged causal attention of long chunks on Hopper: one tile's exponentials overlap with the products of the previous tile.

In Triton, a loop waits for each product where it is computed, so exponentials do not overlap with products. This kernel is
written in Gluon, Triton's lower level (`triton.experimental`), where waits are explicit. No interpreter runs it, so its PTX is
executed in tests (`tests/ptx`). It serves most prompts: 16 bits, heads of 64 or 128, no window, no soft-cap.
prefill.py is its twin and serves everything else; with `GATEHOUSE_OVERLAPPED_PREFILL=0` it serves everything.

    tensor cores │ Q·Kᵀ of tile j   │ weights·V of tile j-1        │ Q·Kᵀ of tile j+1 …
    registers    │                  │ exponentials of tile j  │ ×  │
"""

from __future__ import annotations

import functools
import os

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from kernels.attention_rows import AttentionShape
from kernels.triton.attention import chunk_splits
from kernels.triton.attention.decode import score_factor
from kernels.triton.attention.splits import TABLES, DecodeWorkspace, scheduled_requests
from kernels.triton.launching.card_properties import HOPPER, interpreted

VARIABLE = "GATEHOUSE_OVERLAPPED_PREFILL"
ROWS, KEYS, NUM_WARPS = 128, 128, 8
"""Two warp groups hold 64 rows each. Registers per thread: 64 for scores, 64 for the accumulator, 64 for weights. Queries and
three tiles take 224 KiB of shared memory: one tile is being loaded, one multiplied by queries, one by weights."""
HEAD_SIZES = (64, 128)
_SPLIT_FROM = gl.constexpr(chunk_splits.SPLIT_FROM)

# Triton 3.8 renamed it.
copy_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@functools.cache
def _is_enabled() -> bool:
    return os.environ.get(VARIABLE, "1") != "0"


@gluon.jit(do_not_specialize=["num_requests", "num_tiles", "table_stride", "max_splits"], do_not_specialize_on_alignment=TABLES)
def overlapped_kernel(
    q,
    kv_cache,
    block_tables,
    query_starts,
    context_lens,
    out,
    partial_out,
    partial_lse,
    num_requests,
    num_tiles,
    scale,
    q_stride,
    block_stride,
    table_stride,
    max_splits,
    H: gl.constexpr,
    K: gl.constexpr,
    D: gl.constexpr,
    P: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    SPLIT: gl.constexpr,
    REQUESTS: gl.constexpr,
):
    """One tile of queries for one KV head; with SPLIT > 0, one split of its keys. The tile's request is computed as in
    `query_tiles.tile_owner`, a split's keys as in `chunk_splits.plan_tile_splits`."""
    GROUP: gl.constexpr = H // K
    QUERIES: gl.constexpr = ROWS // GROUP
    DTYPE: gl.constexpr = kv_cache.dtype.element_ty
    REQUEST_LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    LOAD_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [8, 1], [1, 0])
    SCORE_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, KEYS, 16])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    WEIGHT_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, ACC_LAYOUT, 2)
    SHARED_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], DTYPE)

    kv_head = gl.program_id(0) % K
    query_tile = num_tiles - 1 - gl.program_id(0) // K
    index = gl.arange(0, REQUESTS, layout=REQUEST_LAYOUT)
    first_tile = gl.load(query_starts + index, mask=index < num_requests, other=0) // QUERIES + index
    request = gl.maximum(gl.sum(((first_tile <= query_tile) & (index < num_requests)).to(gl.int32), 0) - 1, 0)
    first_row = gl.load(query_starts + request)
    num_queries = gl.load(query_starts + request + 1) - first_row
    first_query = (query_tile - (first_row // QUERIES + request)) * QUERIES
    if (first_query < 0) | (first_query >= num_queries):
        return
    offsets, row_mask = _row_offsets(
        kv_head, first_row, num_queries, first_query, q_stride, D, GROUP, ROWS, gl.SliceLayout(1, LOAD_LAYOUT)
    )
    lane = gl.arange(0, D, layout=gl.SliceLayout(0, LOAD_LAYOUT))
    rows = gl.load(q + offsets[:, None] + lane[None, :], mask=row_mask[:, None], other=0.0)
    queries = gl.allocate_shared_memory(DTYPE, [ROWS, D], gl.NVMMASharedLayout.get_default_for([ROWS, D], DTYPE), rows)
    key_tiles = gl.allocate_shared_memory(DTYPE, [3, KEYS, D], SHARED_LAYOUT)
    value_tiles = gl.allocate_shared_memory(DTYPE, [3, KEYS, D], SHARED_LAYOUT)
    # Keys up to the position of the first query are visible to all queries, keys after `newest` to none.
    start = gl.load(context_lens + request) - num_queries
    newest = start + gl.minimum(first_query + QUERIES, num_queries) - 1
    table = block_tables + request.to(gl.int64) * table_stride
    if SPLIT > 0:
        split, num_tokens = gl.program_id(1), newest + 1
        num_splits = gl.where(num_tokens < _SPLIT_FROM * SPLIT, 1, gl.minimum(num_tokens // SPLIT, max_splits))
        tiles = (num_tokens + num_splits * KEYS - 1) // (num_splits * KEYS)
        num_splits = (num_tokens + tiles * KEYS - 1) // (tiles * KEYS)
        if split >= num_splits:
            return
        # Positions become relative to the split, as if it were the whole request.
        split_begin = split * tiles * KEYS
        table += split_begin // P
        start -= split_begin
        newest = gl.minimum(newest - split_begin, tiles * KEYS - 1)
    position = start + first_query + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORE_LAYOUT)) // GROUP
    num_unmasked = (start + first_query + 1) // KEYS
    if SPLIT > 0:
        num_unmasked = gl.minimum(gl.maximum(num_unmasked, 0), newest // KEYS + 1)
    keys = kv_cache + kv_head * D

    # The pipeline starts with an empty tile: values and weights of zero.
    value_tiles.index(2).store(gl.zeros([KEYS, D], DTYPE, LOAD_LAYOUT))
    previous_weight = gl.zeros([ROWS, KEYS], DTYPE, WEIGHT_LAYOUT)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORE_LAYOUT))
    row_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORE_LAYOUT))
    acc = gl.zeros([ROWS, D], gl.float32, ACC_LAYOUT)
    zeros = gl.zeros([ROWS, KEYS], gl.float32, SCORE_LAYOUT)
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORE_LAYOUT))
    block = _load_blocks(table, 0, newest, P, KEYS, LOAD_LAYOUT)
    _prefetch_tile(key_tiles.index(0), value_tiles.index(0), keys, block, 0, newest, block_stride, K, D, P, KEYS, LOAD_LAYOUT)
    # Block numbers are loaded one tile ahead. Not with SPLIT: there the assembler would move exponentials after the products.
    if SPLIT == 0:
        block = _load_blocks(table, KEYS, newest, P, KEYS, LOAD_LAYOUT)
    for MASKED in gl.static_range(2):
        begin = num_unmasked if MASKED else 0
        end = newest // KEYS + 1 if MASKED else num_unmasked
        for tile in range(begin, end):
            async_copy.wait_group(0)
            fence_async_shared()
            key_tile, value_tile = key_tiles.index(tile % 3), value_tiles.index((tile + 2) % 3)
            score = warpgroup_mma(queries, key_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
            acc = warpgroup_mma(previous_weight, value_tile, acc, is_async=True)
            # All warps have passed the barrier after the wait: no warp still reads the buffers that are overwritten here.
            key_tile, value_tile = key_tiles.index((tile + 1) % 3), value_tiles.index((tile + 1) % 3)
            next_start = (tile + 1) * KEYS
            if SPLIT > 0:
                block = _load_blocks(table, next_start, newest, P, KEYS, LOAD_LAYOUT)
            _prefetch_tile(key_tile, value_tile, keys, block, next_start, newest, block_stride, K, D, P, KEYS, LOAD_LAYOUT)
            if SPLIT == 0:
                block = _load_blocks(table, next_start + KEYS, newest, P, KEYS, LOAD_LAYOUT)
            score = warpgroup_mma_wait(1, deps=[score])
            if MASKED:
                score = gl.where((tile * KEYS + column)[None, :] <= position[:, None], score, float("-inf"))
            new_max = gl.maximum(row_max, gl.max(score, 1) * scale)
            safe_max = new_max
            if SPLIT > 0 and MASKED:  # a split may have no visible key for a query
                safe_max = gl.where(new_max == float("-inf"), 0.0, new_max)
            weight = gl.exp2(score * scale - safe_max[:, None])
            rescale = gl.exp2(row_max - safe_max)
            row_sum = row_sum * rescale + gl.sum(weight, 1)
            row_max = new_max
            weight_operand = gl.convert_layout(weight.to(DTYPE), WEIGHT_LAYOUT)
            acc, _ = warpgroup_mma_wait(0, deps=[acc, previous_weight])
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, ACC_LAYOUT))[:, None]
            previous_weight = weight_operand
    acc = warpgroup_mma(previous_weight, value_tiles.index(newest // KEYS % 3), acc)
    async_copy.wait_group(0)

    if SPLIT > 0:
        row_sum = gl.where(row_sum > 0.0, row_sum, 1.0)
    acc = acc / gl.convert_layout(row_sum, gl.SliceLayout(1, ACC_LAYOUT))[:, None]
    lane = gl.arange(0, D, layout=gl.SliceLayout(0, ACC_LAYOUT))
    if SPLIT > 0:  # noqa: SIM102 - a constant; the rest is defined only then
        if num_splits > 1:
            stride = max_splits * H
            lse_offsets, lse_mask = _row_offsets(
                kv_head, first_row, num_queries, first_query, stride, 1, GROUP, ROWS, gl.SliceLayout(1, SCORE_LAYOUT)
            )
            gl.store(partial_lse + lse_offsets + split * H, row_max + gl.log2(row_sum), mask=lse_mask)
            partial_offsets, partial_mask = _row_offsets(
                kv_head, first_row, num_queries, first_query, stride, 1, GROUP, ROWS, gl.SliceLayout(1, ACC_LAYOUT)
            )
            gl.store(
                partial_out + ((partial_offsets + split * H) * D)[:, None] + lane[None, :], acc, mask=partial_mask[:, None]
            )
            return
    offsets, row_mask = _row_offsets(
        kv_head, first_row, num_queries, first_query, H * D, D, GROUP, ROWS, gl.SliceLayout(1, ACC_LAYOUT)
    )
    gl.store(out + offsets[:, None] + lane[None, :], acc.to(DTYPE), mask=row_mask[:, None])


@gluon.jit
def _row_offsets(
    kv_head,
    first_row,
    num_queries,
    first_query,
    stride,
    D: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """→ offset of each row of a tile and mask of the valid rows: [ROWS], as `query_tiles.tile_rows`"""
    row = gl.arange(0, ROWS, layout=LAYOUT)
    query, head = first_query + row // GROUP, kv_head * GROUP + row % GROUP
    row_mask = (row < ROWS // GROUP * GROUP) & (query < num_queries)
    return (first_row + query).to(gl.int64) * stride + head * D, row_mask


@gluon.jit
def _load_blocks(table, start, newest, P: gl.constexpr, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """→ block numbers of the tokens from `start` on: [KEYS], 0 after `newest`"""
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    return gl.load(table + start // P + column // P, mask=start + column <= newest, other=0)


@gluon.jit
def _prefetch_tile(
    key_tile,
    value_tile,
    keys,
    block,
    start,
    newest,
    block_stride,
    K: gl.constexpr,
    D: gl.constexpr,
    P: gl.constexpr,
    KEYS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Starts the asynchronous load of keys and values from token `start`, a multiple of KEYS, on; zeros after `newest`."""
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    lane = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    in_range = start + column <= newest
    offsets = block.to(gl.int64) * block_stride + column % P * (2 * K * D)
    key_ptrs = keys + offsets[:, None] + lane[None, :]
    copy_async(key_tile, key_ptrs, mask=in_range[:, None])
    copy_async(value_tile, key_ptrs + K * D, mask=in_range[:, None])
    async_copy.commit_group()


def is_overlapped(shape: AttentionShape, kv_bytes: int, rows: int, capability: int) -> bool:
    """Whether this kernel computes chunks in tiles of `rows` on such a card. Triton's interpreter does not support Gluon."""
    is_plain = shape.sliding_window is None and shape.softcap is None
    is_supported = shape.head_dim in HEAD_SIZES and shape.block_size <= KEYS and kv_bytes == 2 and rows == ROWS
    return capability == HOPPER and is_plain and is_supported and _is_enabled() and not interpreted()


def overlapped_prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    shape: AttentionShape,
    num_tiles: int,
    out: torch.Tensor,
    partials: DecodeWorkspace | None,
) -> None:
    """`prefill.paged_prefill` into `out`, where `is_overlapped`: with its formula, operations, masks and types.

    num_tiles: tiles of ROWS rows, of all requests; partials: memory for the partial results of splits, None if no tile is
    split. Bytes: the keys and values before a tile's last query, 4 · D per token and KV head, once per tile; with splits also
    4 · (D + 1) per query, head and split written."""
    partial_out, partial_lse = partials or (None, None)
    num_requests, splits = block_tables.shape[0], 1 if partials is None else partials.partial_out.shape[1]
    overlapped_kernel[(num_tiles * shape.num_kv_heads, splits)](
        q, kv_cache, block_tables, query_starts, context_lens, out, partial_out, partial_lse,
        num_requests, num_tiles, score_factor(shape), q.stride(0), kv_cache.stride(0), block_tables.stride(0), splits,
        **overlapped_constants(shape, is_split=partials is not None), REQUESTS=scheduled_requests(num_requests),
        num_warps=NUM_WARPS,
    )  # fmt: skip


def overlapped_constants(shape: AttentionShape, *, is_split: bool = False) -> dict[str, object]:
    sizes = {"H": shape.num_heads, "K": shape.num_kv_heads, "D": shape.head_dim, "P": shape.block_size}
    return {**sizes, "ROWS": ROWS, "KEYS": KEYS, "SPLIT": chunk_splits.SPLIT_KEYS if is_split else 0}
