"""A tile of attention: rows that share the keys and values they read, from the first key that they see to the last.

Keys are processed in chunks, so that a tile's scores stay in the cache of a core; sums are rescaled when a chunk has a larger
score (online softmax, arXiv 1805.02867; tiles as in arXiv 2205.14135). Scores of few rows are `tiles.dots` of a query with
LANES keys; for many rows keys are transposed once. Weighted sums of values are `tiles.multiply`.

Chunks begin at multiples of CHUNK and keys are added in order. So a query has the same bits whatever is computed in the same
step and however its prompt was cut. Slots outside a row's context are not read.
"""

from __future__ import annotations

import math

import numba

from kernels.simd.compiling import subroutine
from kernels.simd.prefetching import load_and_discard
from kernels.simd.tiles import (
    CACHE_LINE,
    DOT_QUERIES,
    ROWS,
    TILE_VECTORS,
    TRANSPOSED_DOT_QUERIES,
    dots,
    dots_transposed,
    multiply,
    multiply_narrow,
    transpose_keys,
)
from kernels.simd.vectors import (
    BYTES,
    LANES,
    clear,
    exp,
    first_lanes,
    load,
    load_float32,
    load_int32,
    maximum,
    reduce_max,
    reduce_sum,
    splat,
    stack_buffer,
    store,
    store_float32,
    tanh,
)

CHUNK = 512
STRIDE = CHUNK + LANES
HEAD_DIM_MAX = 256

TILE_ROWS = 32
"""Rows of the largest tile, which share the keys and values that are read. Each row has its own scores of a chunk."""

STREAMS = 4
"""Streams in which a block is read, alternately. A processor's prefetching stops at the end of a page of 4 kB, so a single
stream waits for memory at the beginning of each page. With four streams, 16 slots of four heads of 32 begin their pages
together."""

TRANSPOSE_ELEMENTS_PER_QUERY = 8
"""Transposing LANES keys of D elements costs about as much as the sums of D / 8 queries."""

_scores, _sums, _queries = (
    stack_buffer(TILE_ROWS * STRIDE),
    stack_buffer(TILE_ROWS * HEAD_DIM_MAX),
    stack_buffer(TILE_ROWS * HEAD_DIM_MAX),
)
_transposed_keys, _lane_buffer = stack_buffer(LANES * HEAD_DIM_MAX), stack_buffer(LANES)
_row_max, _row_sum = stack_buffer(TILE_ROWS), stack_buffer(TILE_ROWS)


@subroutine
def _scalar_exp(x, scratch):
    store(scratch, 0, exp(splat(x)))
    return load_float32(scratch, 0)


@subroutine
def _multiply_keys(rows, queries, keys, key_stride, count, head_dim, transposed, products):
    """Products of LANES keys, of which `count` exist, with each row of queries. With many rows it pays to transpose the
    keys."""
    if rows * TRANSPOSE_ELEMENTS_PER_QUERY > head_dim:
        transpose_keys(keys, key_stride, count, head_dim, transposed)
        for row in range(0, rows, TRANSPOSED_DOT_QUERIES):
            row_queries, target = queries + row * head_dim * BYTES, products + row * STRIDE * BYTES
            dots_transposed(min(TRANSPOSED_DOT_QUERIES, rows - row), row_queries, head_dim, transposed, target, STRIDE)
    else:
        for row in range(0, rows, DOT_QUERIES):
            row_queries, target = queries + row * head_dim * BYTES, products + row * STRIDE * BYTES
            dots(min(DOT_QUERIES, rows - row), row_queries, keys, key_stride, count, head_dim, target, STRIDE)


@subroutine
def _softcap_and_mask(products, rows, heads, count, visible, window, softcap):
    """Bound the scores of `count` keys, of which the first query sees `visible`, by the cap, and set those of keys that a row
    does not see to -inf."""
    minus_infinity = splat(-math.inf)
    for row in range(rows):
        scores = load(products, row * STRIDE)
        if softcap > 0:
            scores = tanh(scores * splat(numba.float32(1.0) / softcap)) * splat(softcap)
        row_visible = visible + row // heads
        scores = first_lanes(scores, min(count, row_visible), minus_infinity)
        if window > 0 and row_visible > window:
            scores = first_lanes(minus_infinity, row_visible - window, scores)
        store(products, row * STRIDE, scores)


@subroutine
def _prefetch_slots(keys, slot_stride, count, size):
    """Read `size` elements of the keys, and as many of the values, of `count` slots once, in STREAMS streams alternately."""
    keys_per_stream = -(-count // STREAMS)
    for key in range(keys_per_stream):
        for kv_offset in range(0, slot_stride * BYTES, slot_stride // 2 * BYTES):
            for line in range(kv_offset, kv_offset + size * BYTES, CACHE_LINE):
                for stream in range(STREAMS):
                    load_and_discard(keys + min(stream * keys_per_stream + key, count - 1) * slot_stride * BYTES + line)


@subroutine
def _score_chunk(
    scores,
    kv_heads,
    rows,
    heads,
    queries,
    transposed,
    head_dim,
    cache,
    table,
    block_size,
    slot_stride,
    first,
    end,
    query_position,
    window,
    softcap,
    is_cold,
):
    """Scores of the keys `first` to `end` - 1 for each row, at their places in the chunk; -inf for keys that a row does not
    see.

    `query_position`: the position of the first query. `cache`: key 0 of slot 0.
    """
    minus_infinity = splat(-math.inf)
    base = first // CHUNK * CHUNK
    for row in range(kv_heads * rows):
        store(scores, row * STRIDE + (first - base) // LANES * LANES, minus_infinity)
        store(scores, row * STRIDE + (end - 1 - base) // LANES * LANES, minus_infinity)
    position = first
    while position < end:
        count = min(LANES, end - position, block_size - position % block_size)
        keys = cache + (load_int32(table, position // block_size) * block_size + position % block_size) * slot_stride * BYTES
        if is_cold:
            _prefetch_slots(keys, slot_stride, count, kv_heads * head_dim)
        for kv_head in range(kv_heads):
            products = scores + (kv_head * rows * STRIDE + position - base) * BYTES
            _multiply_keys(
                rows,
                queries + kv_head * rows * head_dim * BYTES,
                keys + kv_head * head_dim * BYTES,
                slot_stride,
                count,
                head_dim,
                transposed,
                products,
            )
            visible = query_position + 1 - position
            if count < LANES or visible < LANES or window > 0 or softcap > 0:
                _softcap_and_mask(products, rows, heads, count, visible, window, softcap)
        position += count


@subroutine
def _softmax_chunk(scores, rows, head_dim, first, end, sums, row_max, row_sum, scratch):
    """Turn scores into softmax weights relative to the largest score so far, and rescale the sums so far to it."""
    base = first // CHUNK * CHUNK
    low, high = (first - base) // LANES * LANES, end - base
    for row in range(rows):
        row_index = row * STRIDE
        maximum_scores = load(scores, row_index + low)
        for index in range(low + LANES, high, LANES):
            maximum_scores = maximum(maximum_scores, load(scores, row_index + index))
        old_max = load_float32(row_max, row)
        new_max = max(old_max, reduce_max(maximum_scores))
        shift = numba.float32(0.0) if new_max == -math.inf else new_max
        weights = splat(0.0)
        for index in range(low, high, LANES):
            weight = exp(load(scores, row_index + index) - splat(shift))
            store(scores, row_index + index, weight)
            weights = weights + weight
        factor = numba.float32(1.0)
        if old_max != new_max:
            factor = _scalar_exp(old_max - shift, scratch)
            for index in range(0, head_dim, LANES):
                store(sums, row * head_dim + index, load(sums, row * head_dim + index) * splat(factor))
        store_float32(row_sum, row, load_float32(row_sum, row) * factor + reduce_sum(weights))
        store_float32(row_max, row, new_max)


@subroutine
def _multiply_values(rows, weights, values, slot_stride, count, sums, head_dim):
    for row in range(0, rows, ROWS):
        num_rows, factors, row_sums = min(ROWS, rows - row), weights + row * STRIDE * BYTES, sums + row * head_dim * BYTES
        if head_dim % (TILE_VECTORS * LANES) == 0:
            for offset in range(0, head_dim * BYTES, TILE_VECTORS * LANES * BYTES):
                target = row_sums + offset
                multiply(num_rows, factors, STRIDE, values + offset, slot_stride, count, target, head_dim, target, head_dim, 0)
        else:
            for offset in range(0, head_dim * BYTES, LANES * BYTES):
                target = row_sums + offset
                multiply_narrow(
                    num_rows, factors, STRIDE, values + offset, slot_stride, count, target, head_dim, target, head_dim, 0
                )


@subroutine
def _add_values(scores, kv_heads, rows, head_dim, values, table, block_size, slot_stride, first, end, sums):
    """Add weights times values of the keys `first` to `end` - 1."""
    base = first // CHUNK * CHUNK
    position = first
    while position < end:
        count = min(end - position, block_size - position % block_size)
        block_values = (
            values + (load_int32(table, position // block_size) * block_size + position % block_size) * slot_stride * BYTES
        )
        weights = scores + (position - base) * BYTES
        for kv_head in range(kv_heads):
            first_row = kv_head * rows
            _multiply_values(
                rows,
                weights + first_row * STRIDE * BYTES,
                block_values + kv_head * head_dim * BYTES,
                slot_stride,
                count,
                sums + first_row * head_dim * BYTES,
                head_dim,
            )
        position += count


@subroutine
def attend_tile(
    kv_heads, rows, heads, queries, query_stride, head_dim, cache, slot_stride, table, block_size, query_position, window,
    scale, softcap, out, out_stride, is_cold,
):  # fmt: skip
    """Attention of a tile: `rows` rows for each of `kv_heads` neighbouring key heads, namely `heads` heads of consecutive
    queries, the first of which is at position `query_position`.

    If the tile `is_cold`, its slots are not in the cache: it reads its part of each block once before it computes scores.
    This takes half the time, because values are between the keys and are needed later. Later tiles of a row find them cached.
    """
    scores, sums, scratch = _scores(), _sums(), _lane_buffer()
    scaled_queries, transposed = _queries(), _transposed_keys()
    row_max, row_sum = _row_max(), _row_sum()
    num_rows = kv_heads * rows
    clear(sums, num_rows * head_dim)
    for row in range(num_rows):
        head, query = row // rows * heads + row % heads, row % rows // heads
        for index in range(0, head_dim, LANES):
            store(
                scaled_queries,
                row * head_dim + index,
                load(queries + (query * query_stride + head * head_dim) * BYTES, index) * splat(scale),
            )
        store_float32(row_max, row, -math.inf)
        store_float32(row_sum, row, 0.0)
    values = cache + slot_stride // 2 * BYTES
    first = max(0, query_position + 1 - window) if window > 0 else 0
    keys_end = query_position + rows // heads
    while first < keys_end:
        end = min(keys_end, (first // CHUNK + 1) * CHUNK)
        _score_chunk(
            scores, kv_heads, rows, heads, scaled_queries, transposed, head_dim, cache, table, block_size, slot_stride,
            first, end, query_position, window, softcap, is_cold,
        )  # fmt: skip
        _softmax_chunk(scores, num_rows, head_dim, first, end, sums, row_max, row_sum, scratch)
        _add_values(scores, kv_heads, rows, head_dim, values, table, block_size, slot_stride, first, end, sums)
        first = end
    for row in range(num_rows):
        head, query = row // rows * heads + row % heads, row % rows // heads
        target = out + (query * out_stride + head * head_dim) * BYTES
        inverse_sum = numba.float32(1.0) / load_float32(row_sum, row)
        for index in range(0, head_dim, LANES):
            store(target, index, load(sums, row * head_dim + index) * splat(inverse_sum))
