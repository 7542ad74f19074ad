"""Paged causal attention of long chunks on Hopper: one tile's exponentials overlap with the products of the tile before.

In Triton's language a loop waits for a product in the place where it is computed, so exponentials overlap with no product. This
kernel is in Gluon, Triton's lower level (`triton.experimental`), where waits are explicit; no interpreter runs it, so its PTX
is executed in tests (`tests/ptx`). It serves most prompts: 16 bits, heads of 64 or 128, no window, no cap. `attention_prefill`
serves everything else and is its twin; with `GATEHOUSE_OVERLAPPED_PREFILL=0` it serves all.

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
from kernels.triton import chunk_splits
from kernels.triton.attention_decode import score_factor
from kernels.triton.attention_splits import TABLES, DecodeWorkspace, scheduled_requests
from kernels.triton.tuning import HOPPER, interpreted

VARIABLE = "GATEHOUSE_OVERLAPPED_PREFILL"
ROWS, KEYS, NUM_WARPS = 128, 128, 8
"""Two groups of four warps hold 64 rows each. Registers per thread: 64 for scores, 64 for results, 64 for weights. Queries and
three tiles take 224 KiB: one tile is being loaded, one multiplied with queries, one with weights."""
HEAD_SIZES = (64, 128)
_FROM = gl.constexpr(chunk_splits.SPLIT_FROM)

# Triton 3.8 renamed it.
copy_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@functools.cache
def _is_wanted() -> bool:
    return os.environ.get(VARIABLE, "1") != "0"


@gluon.jit(do_not_specialize=["num_requests", "num_tiles", "table_stride", "max_splits"], do_not_specialize_on_alignment=TABLES)
def overlapped_kernel(
    q,
    kv_cache,
    block_tables,
    query_starts,
    context_lens,
    out,
    attended,
    log_weights,
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
    """One tile of queries, for one key head; with SPLIT, which is 0 otherwise, one of its splits. Whose it is: as
    `query_tiles.tile_owner`; which keys are a split's: as `chunk_splits.splits_of_tile`."""
    GROUP: gl.constexpr = H // K
    QUERIES: gl.constexpr = ROWS // GROUP
    DTYPE: gl.constexpr = kv_cache.dtype.element_ty
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [8, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, KEYS, 16])
    FOUND: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, FOUND, 2)
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], DTYPE)

    kv_head = gl.program_id(0) % K
    query_tile = num_tiles - 1 - gl.program_id(0) // K
    each = gl.arange(0, REQUESTS, layout=EACH)
    first_tile = gl.load(query_starts + each, mask=each < num_requests, other=0) // QUERIES + each
    request = gl.maximum(gl.sum(((first_tile <= query_tile) & (each < num_requests)).to(gl.int32), 0) - 1, 0)
    first_row = gl.load(query_starts + request)
    num_queries = gl.load(query_starts + request + 1) - first_row
    first = (query_tile - (first_row // QUERIES + request)) * QUERIES
    if (first < 0) | (first >= num_queries):
        return
    places, live = _row_places(kv_head, first_row, num_queries, first, q_stride, D, GROUP, ROWS, gl.SliceLayout(1, LOADED))
    lane = gl.arange(0, D, layout=gl.SliceLayout(0, LOADED))
    rows = gl.load(q + places[:, None] + lane[None, :], mask=live[:, None], other=0.0)
    queries = gl.allocate_shared_memory(DTYPE, [ROWS, D], gl.NVMMASharedLayout.get_default_for([ROWS, D], DTYPE), rows)
    key_tiles = gl.allocate_shared_memory(DTYPE, [3, KEYS, D], SHARED)
    value_tiles = gl.allocate_shared_memory(DTYPE, [3, KEYS, D], SHARED)
    # Positions of the queries: every key up to the first one's is seen by all of them, none behind `newest` by any.
    start = gl.load(context_lens + request) - num_queries
    newest = start + gl.minimum(first + QUERIES, num_queries) - 1
    table = block_tables + request.to(gl.int64) * table_stride
    if SPLIT > 0:
        split, num_tokens = gl.program_id(1), newest + 1
        num_splits = gl.where(num_tokens < _FROM * SPLIT, 1, gl.minimum(num_tokens // SPLIT, max_splits))
        tiles = (num_tokens + num_splits * KEYS - 1) // (num_splits * KEYS)
        num_splits = (num_tokens + tiles * KEYS - 1) // (tiles * KEYS)
        if split >= num_splits:
            return
        # As if the request began with the split and ended with it.
        skipped = split * tiles * KEYS
        table += skipped // P
        start -= skipped
        newest = gl.minimum(newest - skipped, tiles * KEYS - 1)
    position = start + first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES)) // GROUP
    num_whole = (start + first + 1) // KEYS
    if SPLIT > 0:
        num_whole = gl.minimum(gl.maximum(num_whole, 0), newest // KEYS + 1)
    keys = kv_cache + kv_head * D

    # In front of the first tile stands one that weighs nothing.
    value_tiles.index(2).store(gl.zeros([KEYS, D], DTYPE, LOADED))
    weight = gl.zeros([ROWS, KEYS], DTYPE, WEIGHTS)
    largest = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    found = gl.zeros([ROWS, D], gl.float32, FOUND)
    nothing = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
    block = _blocks(table, 0, newest, P, KEYS, LOADED)
    _load_tile(key_tiles.index(0), value_tiles.index(0), keys, block, 0, newest, block_stride, K, D, P, KEYS, LOADED)
    # The blocks of a tile are asked for a tile ahead of it, but by splits: their exponentials would come behind the products.
    if SPLIT == 0:
        block = _blocks(table, KEYS, newest, P, KEYS, LOADED)
    for MASKED in gl.static_range(2):
        begin = num_whole if MASKED else 0
        end = newest // KEYS + 1 if MASKED else num_whole
        for tile in range(begin, end):
            async_copy.wait_group(0)
            fence_async_shared()
            key_tile, value_tile = key_tiles.index(tile % 3), value_tiles.index((tile + 2) % 3)
            score = warpgroup_mma(queries, key_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
            found = warpgroup_mma(weight, value_tile, found, is_async=True)
            # All warps have passed the barrier behind the wait: nobody reads any more what is loaded over.
            key_tile, value_tile = key_tiles.index((tile + 1) % 3), value_tiles.index((tile + 1) % 3)
            following = (tile + 1) * KEYS
            if SPLIT > 0:
                block = _blocks(table, following, newest, P, KEYS, LOADED)
            _load_tile(key_tile, value_tile, keys, block, following, newest, block_stride, K, D, P, KEYS, LOADED)
            if SPLIT == 0:
                block = _blocks(table, following + KEYS, newest, P, KEYS, LOADED)
            score = warpgroup_mma_wait(1, deps=[score])
            if MASKED:
                score = gl.where((tile * KEYS + column)[None, :] <= position[:, None], score, float("-inf"))
            larger = gl.maximum(largest, gl.max(score, 1) * scale)
            base = larger
            if SPLIT > 0 and MASKED:  # which may begin behind what a query sees
                base = gl.where(larger == float("-inf"), 0.0, larger)
            power = gl.exp2(score * scale - base[:, None])
            faded = gl.exp2(largest - base)
            total = total * faded + gl.sum(power, 1)
            largest = larger
            rounded = gl.convert_layout(power.to(DTYPE), WEIGHTS)
            found, _ = warpgroup_mma_wait(0, deps=[found, weight])
            found = found * gl.convert_layout(faded, gl.SliceLayout(1, FOUND))[:, None]
            weight = rounded
    found = warpgroup_mma(weight, value_tiles.index(newest // KEYS % 3), found)
    async_copy.wait_group(0)

    if SPLIT > 0:
        total = gl.where(total > 0.0, total, 1.0)
    found = found / gl.convert_layout(total, gl.SliceLayout(1, FOUND))[:, None]
    lane = gl.arange(0, D, layout=gl.SliceLayout(0, FOUND))
    if SPLIT > 0:  # noqa: SIM102 - a constant, and what is behind it exists only then
        if num_splits > 1:
            stride = max_splits * H
            parts, filled = _row_places(
                kv_head, first_row, num_queries, first, stride, 1, GROUP, ROWS, gl.SliceLayout(1, SCORES)
            )
            gl.store(log_weights + parts + split * H, largest + gl.log2(total), mask=filled)
            part, full = _row_places(kv_head, first_row, num_queries, first, stride, 1, GROUP, ROWS, gl.SliceLayout(1, FOUND))
            gl.store(attended + ((part + split * H) * D)[:, None] + lane[None, :], found, mask=full[:, None])
            return
    places, live = _row_places(kv_head, first_row, num_queries, first, H * D, D, GROUP, ROWS, gl.SliceLayout(1, FOUND))
    gl.store(out + places[:, None] + lane[None, :], found.to(DTYPE), mask=live[:, None])


@gluon.jit
def _row_places(
    kv_head,
    first_row,
    num_queries,
    first,
    stride,
    D: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """→ where each row of a tile begins, and whether there is one: [ROWS], as `query_tiles.tile_rows`."""
    row = gl.arange(0, ROWS, layout=LAYOUT)
    query, head = first + row // GROUP, kv_head * GROUP + row % GROUP
    live = (row < ROWS // GROUP * GROUP) & (query < num_queries)
    return (first_row + query).to(gl.int64) * stride + head * D, live


@gluon.jit
def _blocks(table, first, newest, P: gl.constexpr, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """Numbers of the blocks of the tokens from `first`: [KEYS], 0 behind the newest."""
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    return gl.load(table + first // P + column // P, mask=first + column <= newest, other=0)


@gluon.jit
def _load_tile(
    key_tile,
    value_tile,
    keys,
    block,
    first,
    newest,
    block_stride,
    K: gl.constexpr,
    D: gl.constexpr,
    P: gl.constexpr,
    KEYS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Begins to load the keys and values of the tokens from `first`, a multiple of KEYS, to `newest`; zeros behind it."""
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    lane = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    held = first + column <= newest
    place = block.to(gl.int64) * block_stride + column % P * (2 * K * D)
    places = keys + place[:, None] + lane[None, :]
    copy_async(key_tile, places, mask=held[:, None])
    copy_async(value_tile, places + K * D, mask=held[:, None])
    async_copy.commit_group()


def is_overlapped(shape: AttentionShape, kv_bytes: int, rows: int, capability: int) -> bool:
    """Whether chunks in tiles of `rows` are computed by this kernel on such a card. The interpreter has no Gluon."""
    is_plain = shape.sliding_window is None and shape.softcap is None
    is_held = shape.head_dim in HEAD_SIZES and shape.block_size <= KEYS and kv_bytes == 2 and rows == ROWS
    return capability == HOPPER and is_plain and is_held and _is_wanted() and not interpreted()


def overlapped_prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    shape: AttentionShape,
    num_tiles: int,
    out: torch.Tensor,
    parts: DecodeWorkspace | None = None,
) -> torch.Tensor:
    """`attention_prefill.paged_prefill` for chunks that are `is_overlapped`, into `out`. num_tiles: tiles of ROWS rows, of all
    requests; parts: where splits of a tile write their results, None if no tile is split."""
    attended, log_weights = parts or (None, None)
    num_requests, splits = block_tables.shape[0], 1 if parts is None else parts.attended.shape[1]
    overlapped_kernel[(num_tiles * shape.num_kv_heads, splits)](
        q, kv_cache, block_tables, query_starts, context_lens, out, attended, log_weights,
        num_requests, num_tiles, score_factor(shape), q.stride(0), kv_cache.stride(0), block_tables.stride(0), splits,
        **overlapped_constants(shape, is_split=parts is not None), REQUESTS=scheduled_requests(num_requests),
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


def overlapped_constants(shape: AttentionShape, *, is_split: bool = False) -> dict[str, object]:
    sizes = {"H": shape.num_heads, "K": shape.num_kv_heads, "D": shape.head_dim, "P": shape.block_size}
    return {**sizes, "ROWS": ROWS, "KEYS": KEYS, "SPLIT": chunk_splits.SPLIT_KEYS if is_split else 0}
