"""The kernels of attention.py: attention of a tile of 64 rows over splits of its keys, and the merge."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attention.newest_token import scaled_score
from kernels.triton.attention.query_tiles import load_tile_queries, tile_key_range, tile_owner, tile_rows
from kernels.triton.attention.splits import TABLES
from kernels.triton.launching.early_launch import wait_for_previous

SIZES = ("num_requests", "max_splits")
_UNSPECIALISED = [*SIZES, "num_tiles", "table_stride"]


@triton.jit
def merge_partials(acc, row_sum, row_max, split_acc, split_sum, split_max):
    """Merges a split's accumulator, sum of weights and maximum into those of the splits before it: [R, WIDTH], [R], [R]
    float32. Exact where either side has no visible keys: the result is the other side, bit by bit."""
    new_max = tl.maximum(row_max, split_max)
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale, split_rescale = tl.exp2(row_max - safe_max), tl.exp2(split_max - safe_max)
    return acc * rescale[:, None] + split_acc * split_rescale[:, None], row_sum * rescale + split_sum * split_rescale, new_max


@triton.jit
def _normalise(acc, row_sum, value_scale):
    return acc * (value_scale / tl.where(row_sum > 0.0, row_sum, 1.0))[:, None]


@triton.jit
def _first_split(position, WINDOW: tl.constexpr, SPLIT: tl.constexpr):
    """→ the first split that a query attends to"""
    return tl.maximum(position + 1 - WINDOW, 0) // SPLIT if WINDOW > 0 else position * 0


@triton.jit(do_not_specialize=_UNSPECIALISED, do_not_specialize_on_alignment=TABLES)
def rows_kernel(
    q, kv_cache, block_tables, query_starts, context_lens, kv_scales, out, partial_acc, partial_stats,
    num_requests, num_tiles, scale, q_stride, block_stride, table_stride, max_splits,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, REQUESTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program (tile and KV head, share): all splits of a tile, or every n-th of them if n programs share the tile."""
    wait_for_previous(EARLY)
    GROUP: tl.constexpr = H // K
    QUERIES: tl.constexpr = ROWS // GROUP
    kv_head, request, first_row, num_queries, first_query = tile_owner(
        query_starts, num_requests, num_tiles, K, QUERIES, REQUESTS
    )
    if first_query >= num_queries:
        return
    query, token_row, head, _row_mask, element_mask = tile_rows(
        kv_head, first_row, num_queries, first_query, GROUP, D, ROWS, WIDTH
    )
    queries = load_tile_queries(q, q_stride, token_row, head, element_mask, D, WIDTH, kv_cache.dtype.element_ty)
    lane = tl.arange(0, WIDTH)
    value_scale = 1.0
    if kv_scales is not None:
        scale *= tl.load(kv_scales)
        value_scale = tl.load(kv_scales + 1)
    start = tl.load(context_lens + request) - num_queries
    position = start + query
    begin, oldest, newest = tile_key_range(start, first_query, num_queries, QUERIES, WINDOW, KEYS)
    first_split, end_split = begin // SPLIT, (newest + SPLIT) // SPLIT  # none if `newest` is -1: a request without tokens
    is_shared = tl.num_programs(1) > 1
    splits_per_run = tl.where(is_shared, 1, end_split)
    run_end, run_step = tl.maximum(end_split, first_split + 1), tl.maximum(splits_per_run, tl.num_programs(1))
    for run in tl.range(first_split + tl.program_id(1), run_end, run_step, num_stages=1, disable_licm=True):
        row_max = tl.full([ROWS], float("-inf"), tl.float32)
        row_sum = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        for split in tl.range(run, tl.minimum(run + splits_per_run, end_split), num_stages=1):
            split_acc, split_sum, split_max = _attend_split(
                queries, kv_cache + kv_head * D, block_tables + request.to(tl.int64) * table_stride,
                tl.maximum(split * SPLIT, begin), tl.minimum(split * SPLIT + SPLIT, newest + 1), position, oldest, newest,
                scale, block_stride, 2 * K * D, K * D, D, P, WINDOW, SOFTCAP, KEYS,
            )  # fmt: skip
            acc, row_sum, row_max = merge_partials(acc, row_sum, row_max, split_acc, split_sum, split_max)
        # The row indices are recomputed, from a value loaded again: kept across the loop, they would take its registers.
        reloaded_first_row = tl.load(query_starts + request, volatile=True)
        own_query, own_row, own_head, store_rows, store_mask = tile_rows(
            kv_head, reloaded_first_row, num_queries, first_query + first_row - reloaded_first_row, GROUP, D, ROWS, WIDTH
        )
        offset = own_row * H + own_head
        if is_shared:
            # Relative to the query's own first split: another query of the tile may begin earlier.
            own_position = oldest - first_query + own_query
            split_index = run - _first_split(own_position, WINDOW, SPLIT)
            store_rows = store_rows & (split_index >= 0) & (run * SPLIT <= own_position)
            offset = offset * max_splits + split_index
            tl.store(partial_acc + (offset * D)[:, None] + lane[None, :], acc, mask=store_mask & store_rows[:, None])
            tl.store(partial_stats + 2 * offset, row_sum, mask=store_rows)
            tl.store(partial_stats + 2 * offset + 1, row_max, mask=store_rows)
        else:
            normalised = _normalise(acc, row_sum, value_scale)
            tl.store(out + (offset * D)[:, None] + lane[None, :], normalised.to(out.dtype.element_ty), mask=store_mask)


@triton.jit
def _attend_split(
    queries, keys, table, begin, end, position, oldest, newest, scale, block_stride,
    TOKEN_STRIDE: tl.constexpr, VALUE_OFFSET: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """→ sums of weighted values and of weights, and the maximal score, over tokens begin … end - 1 of one split. Every tile
    begins at a multiple of KEYS and is masked; a tile without visible keys leaves a row unchanged."""
    ROWS: tl.constexpr = queries.shape[0]
    WIDTH: tl.constexpr = queries.shape[1]
    DOT: tl.constexpr = queries.dtype
    column = tl.arange(0, KEYS)
    lane = tl.arange(0, WIDTH)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    # Block numbers are loaded one tile ahead.
    block = tl.load(table + (begin + column) // P, mask=begin + column < end, other=0)
    for start in range(begin, end, KEYS):
        token = start + column
        offsets = block.to(tl.int64) * block_stride + (token % P) * TOKEN_STRIDE
        block = tl.load(table + (token + KEYS) // P, mask=token + KEYS < end, other=0)
        key_ptrs = keys + offsets[:, None] + lane[None, :]
        key = tl.load(key_ptrs) if WIDTH == D else tl.load(key_ptrs, mask=(lane < D)[None, :], other=0.0)
        score = scaled_score(tl.dot(queries, tl.trans(key.to(DOT)), input_precision="ieee"), scale, SOFTCAP)
        visible = token[None, :] <= position[:, None]
        in_range = token <= newest
        if WINDOW > 0:
            visible = visible & (token[None, :] > (position - WINDOW)[:, None])
            in_range = in_range & (token > oldest - WINDOW)
        score = tl.where(visible, score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1))
        # Before the first visible key the maximum is -inf: subtracting 0 instead gives weights of zero, not NaN.
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2(score - safe_max[:, None])
        rescale = tl.exp2(row_max - safe_max)
        row_sum = row_sum * rescale + tl.sum(weight, 1)
        value = tl.load(key_ptrs + VALUE_OFFSET, mask=in_range[:, None] & (lane < D)[None, :], other=0.0)
        acc = tl.dot(weight.to(DOT), value.to(DOT), acc * rescale[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=TABLES[1:])
def merge_rows_kernel(
    query_starts, context_lens, kv_scales, out, partial_acc, partial_stats, num_requests, max_splits,
    H: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr,
    UNROLL: tl.constexpr, REQUESTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (query, head): merges its splits in order, as `rows_kernel` does. Splits beyond the last one change nothing."""
    wait_for_previous(EARLY)
    token_row, head = tl.program_id(0), tl.program_id(1)
    request = tl.arange(0, REQUESTS)
    starts = tl.load(query_starts + request, mask=request < num_requests, other=0)
    request = tl.sum(((starts <= token_row) & (request < num_requests)).to(tl.int32), 0) - 1
    if request < 0:  # before the first request: an unused row
        return
    num_remaining = tl.load(query_starts + request + 1) - token_row
    position = tl.load(context_lens + request) - num_remaining
    num_splits = (position + SPLIT) // SPLIT - _first_split(position, WINDOW, SPLIT)
    lane = tl.arange(0, WIDTH)
    unit = tl.arange(0, 1)
    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, WIDTH], tl.float32)
    first_offset = (token_row.to(tl.int64) * H + head) * max_splits
    for begin in range(0, num_splits, UNROLL):
        for step in tl.static_range(UNROLL):
            split_mask = begin + step + unit < num_splits
            offset = first_offset + begin + step + unit
            partial_mask = split_mask[:, None] & (lane < D)[None, :]
            split_acc = tl.load(partial_acc + (offset * D)[:, None] + lane[None, :], mask=partial_mask, other=0.0)
            split_sum = tl.load(partial_stats + 2 * offset, mask=split_mask, other=0.0)
            split_max = tl.load(partial_stats + 2 * offset + 1, mask=split_mask, other=float("-inf"))
            acc, row_sum, row_max = merge_partials(acc, row_sum, row_max, split_acc, split_sum, split_max)
    value_scale = 1.0
    if kv_scales is not None:
        value_scale = tl.load(kv_scales + 1)
    normalised = _normalise(acc, row_sum, value_scale).to(out.dtype.element_ty)
    offset = (token_row.to(tl.int64) * H + head) * D
    tl.store(out + offset + unit[:, None] * 0 + lane[None, :], normalised, mask=(lane < D)[None, :])
