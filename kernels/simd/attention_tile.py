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

from kernels.simd.compiling import part
from kernels.simd.fetching import touch
from kernels.simd.tiles import (
    CACHE_LINE,
    DOT_QUERIES,
    DOT_ROWS,
    ROWS,
    WIDE,
    dots,
    dots_of_rows,
    multiply,
    multiply_narrow,
    turn,
)
from kernels.simd.vectors import (
    BYTES,
    LANES,
    exp,
    first_lanes,
    get,
    get_int32,
    largest,
    load,
    maximum,
    put,
    splat,
    stack,
    store,
    tanh,
    total,
)

CHUNK = 512
STRIDE = CHUNK + LANES
HEAD_DIM_MAX = 256

TILE_ROWS = 32
"""Rows of the largest tile, which share the keys and values that are read. Each row has its own scores of a chunk."""

STREAMS = 4
"""Places at which a block is read in turn. A processor's prefetching ends with a page of 4 kB, so a single reader waits for
memory at the beginning of each page. With four places, 16 slots of four heads of 32 begin their pages together."""

ROWS_PER_TURN = 8
"""The cost of transposing LANES keys: about that of a query's sums per this many of their numbers."""

_scores, _sums, _queries = stack(TILE_ROWS * STRIDE), stack(TILE_ROWS * HEAD_DIM_MAX), stack(TILE_ROWS * HEAD_DIM_MAX)
_turned, _lane = stack(LANES * HEAD_DIM_MAX), stack(LANES)
_largest_scores, _totals = stack(TILE_ROWS), stack(TILE_ROWS)


@part
def _scalar_exp(x, room):
    store(room, 0, exp(splat(x)))
    return get(room, 0)


@part
def _multiply_keys(rows, queries, keys, key_stride, count, size, turned, products):
    """Products of LANES keys, of which `count` exist, with each row of queries. Many rows are worth transposing the keys."""
    if rows * ROWS_PER_TURN > size:
        turn(keys, key_stride, count, size, turned)
        for row in range(0, rows, DOT_ROWS):
            first, target = queries + row * size * BYTES, products + row * STRIDE * BYTES
            dots_of_rows(min(DOT_ROWS, rows - row), first, size, turned, target, STRIDE)
    else:
        for row in range(0, rows, DOT_QUERIES):
            first, target = queries + row * size * BYTES, products + row * STRIDE * BYTES
            dots(min(DOT_QUERIES, rows - row), first, keys, key_stride, count, size, target, STRIDE)


@part
def _bound_and_hide(products, rows, heads, count, visible, window, softcap):
    """Scores of `count` keys, of which the first query sees `visible`: they are bounded by the cap, and keys that a row does
    not see get -inf."""
    hidden = splat(numba.float32(-math.inf))
    for row in range(rows):
        found = load(products, row * STRIDE)
        if softcap > 0:
            found = tanh(found * splat(numba.float32(1.0) / softcap)) * splat(softcap)
        seen = visible + row // heads
        found = first_lanes(found, min(count, seen), hidden)
        if window > 0 and seen > window:
            found = first_lanes(hidden, seen - window, found)
        store(products, row * STRIDE, found)


@part
def _touch(keys, slot, count, size):
    """Read `size` numbers of the keys, and as many of the values, of `count` slots once, at STREAMS places in turn."""
    behind = -(-count // STREAMS)
    for key in range(behind):
        for part_of in range(0, slot * BYTES, slot // 2 * BYTES):
            for line in range(part_of, part_of + size * BYTES, CACHE_LINE):
                for stream in range(STREAMS):
                    touch(keys + min(stream * behind + key, count - 1) * slot * BYTES + line)


@part
def _score_chunk(
    scores,
    kv_heads,
    rows,
    heads,
    queries,
    turned,
    size,
    cache,
    table,
    block,
    slot,
    first,
    end,
    own,
    window,
    softcap,
    is_cold,
):
    """Scores of the keys `first` to `end` - 1 for each row, at their places in the chunk; -inf for keys that a row does not
    see.

    `own`: the position of the first query. `cache`: key 0 of slot 0.
    """
    hidden = splat(numba.float32(-math.inf))
    base = first // CHUNK * CHUNK
    for row in range(kv_heads * rows):
        store(scores, row * STRIDE + (first - base) // LANES * LANES, hidden)
        store(scores, row * STRIDE + (end - 1 - base) // LANES * LANES, hidden)
    position = first
    while position < end:
        count = min(LANES, end - position, block - position % block)
        keys = cache + (get_int32(table, position // block) * block + position % block) * slot * BYTES
        if is_cold:
            _touch(keys, slot, count, kv_heads * size)
        for kv_head in range(kv_heads):
            products = scores + (kv_head * rows * STRIDE + position - base) * BYTES
            _multiply_keys(
                rows,
                queries + kv_head * rows * size * BYTES,
                keys + kv_head * size * BYTES,
                slot,
                count,
                size,
                turned,
                products,
            )
            visible = own + 1 - position
            if count < LANES or visible < LANES or window > 0 or softcap > 0:
                _bound_and_hide(products, rows, heads, count, visible, window, softcap)
        position += count


@part
def _weigh_chunk(scores, rows, size, first, end, sums, largest_scores, totals, room):
    """Turn scores into weights relative to the largest so far, and rescale the sums so far to it."""
    base = first // CHUNK * CHUNK
    low, high = (first - base) // LANES * LANES, end - base
    for row in range(rows):
        line = row * STRIDE
        found = load(scores, line + low)
        for place in range(low + LANES, high, LANES):
            found = maximum(found, load(scores, line + place))
        before = get(largest_scores, row)
        now = max(before, largest(found))
        shift = numba.float32(0.0) if now == -math.inf else now
        weights = splat(numba.float32(0.0))
        for place in range(low, high, LANES):
            weight = exp(load(scores, line + place) - splat(shift))
            store(scores, line + place, weight)
            weights = weights + weight
        factor = numba.float32(1.0)
        if before != now:
            factor = _scalar_exp(before - shift, room)
            for place in range(0, size, LANES):
                store(sums, row * size + place, load(sums, row * size + place) * splat(factor))
        put(totals, row, get(totals, row) * factor + total(weights))
        put(largest_scores, row, now)


@part
def _multiply_values(rows, weights, values, slot, count, sums, size):
    for row in range(0, rows, ROWS):
        some, factors, line = min(ROWS, rows - row), weights + row * STRIDE * BYTES, sums + row * size * BYTES
        if size % (WIDE * LANES) == 0:
            for offset in range(0, size * BYTES, WIDE * LANES * BYTES):
                target = line + offset
                multiply(some, factors, STRIDE, values + offset, slot, count, target, size, target, size, 0)
        else:
            for offset in range(0, size * BYTES, LANES * BYTES):
                target = line + offset
                multiply_narrow(some, factors, STRIDE, values + offset, slot, count, target, size, target, size, 0)


@part
def _add_values(scores, kv_heads, rows, size, values, table, block, slot, first, end, sums):
    """Add weights times values of the keys `first` to `end` - 1."""
    base = first // CHUNK * CHUNK
    position = first
    while position < end:
        count = min(end - position, block - position % block)
        found = values + (get_int32(table, position // block) * block + position % block) * slot * BYTES
        weights = scores + (position - base) * BYTES
        for kv_head in range(kv_heads):
            line = kv_head * rows
            _multiply_values(
                rows,
                weights + line * STRIDE * BYTES,
                found + kv_head * size * BYTES,
                slot,
                count,
                sums + line * size * BYTES,
                size,
            )
        position += count


@part
def attend_tile(
    kv_heads, rows, heads, queries, query_stride, size, cache, slot, table, block, own, window, scale, softcap, out, out_stride,
    is_cold,
):  # fmt: skip
    """A tile: for each of `kv_heads` neighbouring key heads `rows` rows: `heads` heads of consecutive queries, the first of
    which is at position `own`.

    If the tile `is_cold`, its slots are not in the cache: it reads its part of each block once before it works on the keys.
    This takes half the time, because values are between the keys and are needed later. Later tiles of a row find them cached.
    """
    scores, sums, room = _scores(), _sums(), _lane()
    kept, turned = _queries(), _turned()
    largest_scores, totals = _largest_scores(), _totals()
    all_rows = kv_heads * rows
    for place in range(0, all_rows * size, LANES):
        store(sums, place, splat(numba.float32(0.0)))
    for row in range(all_rows):
        head, query = row // rows * heads + row % heads, row % rows // heads
        for place in range(0, size, LANES):
            store(kept, row * size + place, load(queries + (query * query_stride + head * size) * BYTES, place) * splat(scale))
        put(largest_scores, row, numba.float32(-math.inf))
        put(totals, row, numba.float32(0.0))
    values = cache + slot // 2 * BYTES
    first = max(0, own + 1 - window) if window > 0 else 0
    last = own + rows // heads
    while first < last:
        end = min(last, (first // CHUNK + 1) * CHUNK)
        _score_chunk(
            scores, kv_heads, rows, heads, kept, turned, size, cache, table, block, slot,
            first, end, own, window, softcap, is_cold,
        )  # fmt: skip
        _weigh_chunk(scores, all_rows, size, first, end, sums, largest_scores, totals, room)
        _add_values(scores, kv_heads, rows, size, values, table, block, slot, first, end, sums)
        first = end
    for row in range(all_rows):
        head, query = row // rows * heads + row % heads, row % rows // heads
        target = out + (query * out_stride + head * size) * BYTES
        share = numba.float32(1.0) / get(totals, row)
        for place in range(0, size, LANES):
            store(target, place, load(sums, row * size + place) * splat(share))
