"""Causal attention of queries over the blocks of the paged cache, read where they are: nothing is gathered, nothing padded.

Queries that share their keys make a tile: the query heads of one key head, and of a longer row some consecutive queries. The
keys are passed in chunks, of which a tile's scores stay in the cache of a core, and sums are rescaled when a chunk has a
larger score (online softmax, arXiv 1805.02867; tiles as in arXiv 2205.14135). Scores are `tiles.dots` of a query with LANES
keys, and weighted sums of values are `tiles.multiply`.

Chunks begin at multiples of CHUNK and keys are added in order, so that a query has the same bits whatever is computed beside
it and however its prompt was cut. Slots outside a row's context are not read. Reads 2 · context · D numbers for each tile.
"""

from __future__ import annotations

import math

import numba
import torch

from kernels.attention_rows import AttentionShape
from kernels.simd.compiling import entry, part, task
from kernels.simd.fetching import fetch
from kernels.simd.threads import argument, bits, member, number, pool, run
from kernels.simd.tiles import CACHE_LINE, ROWS, WIDE, dots, multiply, multiply_narrow
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

_scores, _sums, _lane = stack(ROWS * STRIDE), stack(ROWS * HEAD_DIM_MAX), stack(LANES)
_largest_scores, _totals = stack(ROWS), stack(ROWS)


def can_attend(shape: AttentionShape) -> bool:
    """Whether the attention here knows such heads."""
    return shape.causal and shape.head_dim % LANES == 0 and shape.head_dim <= HEAD_DIM_MAX


@part
def _scalar_exp(x, room):
    store(room, 0, exp(splat(x)))
    return get(room, 0)


@part
def _score_keys(query, keys, key_stride, count, size, scale, softcap):
    """Scores of LANES keys of which `count` are there, -inf for the others."""
    scores = dots(query, keys, key_stride, count, size)
    return tanh(scores * splat(scale / softcap)) * splat(softcap) if softcap > 0 else scores * splat(scale)


@part
def _fetch(keys, slot, count, size):
    """Ask for a head's keys and values of `count` slots."""
    for key in range(count):
        for offset in range(0, size * BYTES, CACHE_LINE):
            fetch(keys + key * slot * BYTES + offset)
            fetch(keys + (key * slot + slot // 2) * BYTES + offset)


@part
def _score_chunk(
    scores,
    rows,
    heads,
    queries,
    query_stride,
    size,
    cache,
    table,
    block,
    slot,
    first,
    end,
    own,
    window,
    scale,
    softcap,
    fetches,
):
    """Scores of the keys `first` to `end` - 1 for each row, at their places in the chunk; what a row does not see is -inf.

    `own`: the position of the first query; rows are its heads, then those of the next query. `cache`: key 0 of slot 0.
    """
    hidden = splat(numba.float32(-math.inf))
    base = first // CHUNK * CHUNK
    for row in range(rows):
        store(scores, row * STRIDE + (first - base) // LANES * LANES, hidden)
        store(scores, row * STRIDE + (end - 1 - base) // LANES * LANES, hidden)
    position = first
    while position < end:
        count = min(LANES, end - position, block - position % block)
        keys = cache + (get_int32(table, position // block) * block + position % block) * slot * BYTES
        behind = position + count
        if fetches and behind < end:
            following = cache + (get_int32(table, behind // block) * block + behind % block) * slot * BYTES
            _fetch(following, slot, min(LANES, end - behind, block - behind % block), size)
        for row in range(rows):
            query = queries + (row // heads * query_stride + row % heads * size) * BYTES
            seen = min(count, own + row // heads + 1 - position)
            found = hidden
            if seen > 0:
                found = first_lanes(_score_keys(query, keys, slot, count, size, scale, softcap), seen, hidden)
            before = own + row // heads + 1 - window - position
            if window > 0 and before > 0:
                found = first_lanes(hidden, before, found)
            store(scores, row * STRIDE + position - base, found)
        position += count


@part
def _weigh_chunk(scores, rows, size, first, end, sums, largest_scores, totals, room):
    """Scores become weights relative to the largest so far, and the sums so far are rescaled to it."""
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
def _add_values(scores, rows, size, values, table, block, slot, first, end, sums):
    """Weights times the values of the keys `first` to `end` - 1."""
    base = first // CHUNK * CHUNK
    position = first
    while position < end:
        count = min(end - position, block - position % block)
        found = values + (get_int32(table, position // block) * block + position % block) * slot * BYTES
        weights = scores + (position - base) * BYTES
        if size % (WIDE * LANES) == 0:
            for column in range(0, size, WIDE * LANES):
                target = sums + column * BYTES
                multiply(rows, weights, STRIDE, found + column * BYTES, slot, count, target, size, target, size, 0)
        else:
            for column in range(0, size, LANES):
                target = sums + column * BYTES
                multiply_narrow(rows, weights, STRIDE, found + column * BYTES, slot, count, target, size, target, size, 0)
        position += count


@part
def _attend_tile(
    rows, heads, queries, query_stride, size, cache, num_kv_heads, table, block, own, window, scale, softcap, out, out_stride,
    fetches,
):  # fmt: skip
    """`rows` rows: `heads` heads of each of the consecutive queries, the first of which is at position `own`.

    A tile that `fetches` asks for a head's part of the next slots while it scores some: they lie apart, so that the processor
    does not see them coming. Tiles after the first of a row find them in the cache.
    """
    scores, sums, room = _scores(), _sums(), _lane()
    largest_scores, totals = _largest_scores(), _totals()
    zeros = splat(numba.float32(0.0))
    for place in range(0, rows * size, LANES):
        store(sums, place, zeros)
    for row in range(rows):
        put(largest_scores, row, numba.float32(-math.inf))
        put(totals, row, numba.float32(0.0))
    slot = 2 * num_kv_heads * size
    values = cache + num_kv_heads * size * BYTES
    first = max(0, own + 1 - window) if window > 0 else 0
    last = own + rows // heads
    while first < last:
        end = min(last, (first // CHUNK + 1) * CHUNK)
        _score_chunk(
            scores, rows, heads, queries, query_stride, size, cache, table, block, slot,
            first, end, own, window, scale, softcap, fetches,
        )  # fmt: skip
        _weigh_chunk(scores, rows, size, first, end, sums, largest_scores, totals, room)
        _add_values(scores, rows, size, values, table, block, slot, first, end, sums)
        first = end
    for row in range(rows):
        target = out + (row // heads * out_stride + row % heads * size) * BYTES
        share = numba.float32(1.0) / get(totals, row)
        for place in range(0, size, LANES):
            store(target, place, load(sums, row * size + place) * splat(share))


@part
def _clear(target, count):
    for place in range(0, count, LANES):
        store(target, place, splat(numba.float32(0.0)))


@task
def _rows(a):
    """Tiles of all rows, each thread every so many."""
    q, q_stride, cache, tables, table_width = argument(a, 0), argument(a, 1), argument(a, 2), argument(a, 3), argument(a, 4)
    starts, lengths, num_rows, out = argument(a, 5), argument(a, 6), argument(a, 7), argument(a, 8)
    num_heads, num_kv_heads, size, block = argument(a, 9), argument(a, 10), argument(a, 11), argument(a, 12)
    window, scale, softcap = argument(a, 13), number(argument(a, 14)), number(argument(a, 15))
    index, threads = member(a)
    group = num_heads // num_kv_heads
    heads = min(group, ROWS)
    length = ROWS // heads
    turn = 0
    for row in range(num_rows):
        first, end = row, row + 1
        if starts:
            first, end = get_int32(starts, row), get_int32(starts, row + 1)
        context = get_int32(lengths, row)
        table = tables + row * table_width * BYTES
        for query in range(first, end, length):
            count = min(length, end - query)
            for kv_head in range(num_kv_heads):
                turn += 1
                if turn % threads != index:
                    continue
                for head in range(kv_head * group, (kv_head + 1) * group, heads):
                    width = min(heads, (kv_head + 1) * group - head)
                    target = out + (query * num_heads + head) * size * BYTES
                    if context == 0:
                        _clear(target, width * size)
                        continue
                    _attend_tile(
                        width * count,
                        width,
                        q + (query * q_stride + head * size) * BYTES,
                        q_stride,
                        size,
                        cache + kv_head * size * BYTES,
                        num_kv_heads,
                        table,
                        block,
                        context - (end - query),
                        window,
                        scale,
                        softcap,
                        target,
                        num_heads * size,
                        query == first and head == kv_head * group,
                    )


@entry(17, 2)
def _attend(
    pool, threads, task, q, q_stride, cache, tables, table_width, starts, lengths, num_rows, out,
    num_heads, num_kv_heads, size, block, window, scale, softcap,
):  # fmt: skip
    run(
        pool, threads, task,
        (q, q_stride, cache, tables, table_width, starts, lengths, num_rows, out,
         num_heads, num_kv_heads, size, block, window, bits(scale), bits(softcap)),
    )  # fmt: skip


def paged_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    shape: AttentionShape,
    *,
    kv_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: None = None,  # the signature of those that have one
) -> torch.Tensor:
    """q: [B, H, D], kv_cache: [N, P, 2, K, D] float32, block_tables: [B, M] int32, context_lens: [B] int32, 0 for no row →
    [B, H, D]"""
    return _attention(q, kv_cache, block_tables, context_lens, shape, None, out)


def paged_prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    shape: AttentionShape,
    *,
    max_query_len: int,
    kv_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """q: [T, H, D], query_starts: [B + 1] int32; the last query of a row sees context_lens[b] tokens, each one before it one
    less → [T, H, D]"""
    return _attention(q, kv_cache, block_tables, context_lens, shape, query_starts, out)


def _attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    shape: AttentionShape,
    query_starts: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    assert kv_cache.dtype is torch.float32, "a cache in other formats is gathered and decoded"
    num_heads, size = shape.num_heads, shape.head_dim
    attended = torch.empty(q.shape[0], num_heads, size) if out is None else out
    team = pool()
    work = q.shape[0] * num_heads * size * block_tables.shape[1] * shape.block_size
    _attend(
        team.address,
        team.threads(work),
        _rows.address,
        q.data_ptr(),
        q.stride(0),
        kv_cache.data_ptr(),
        block_tables.data_ptr(),
        block_tables.stride(0),
        0 if query_starts is None else query_starts.data_ptr(),
        context_lens.data_ptr(),
        context_lens.shape[0],
        attended.data_ptr(),
        num_heads,
        shape.num_kv_heads,
        size,
        shape.block_size,
        shape.sliding_window or 0,
        size**-0.5 if shape.scale is None else shape.scale,
        shape.softcap or 0.0,
    )
    return attended
