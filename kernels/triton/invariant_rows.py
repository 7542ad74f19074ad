"""The kernels of invariant_attention.py: the results of a tile of 64 rows for splits of its keys, and their merge."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attention_splits import TABLES
from kernels.triton.early_launch import wait_for_previous
from kernels.triton.query_tiles import tile_owner, tile_queries, tile_rows

SIZES = ("num_requests", "max_splits")
_NUMBERS = [*SIZES, "num_tiles", "table_stride"]


@triton.jit
def merged(found, total, largest, more_found, more_total, more_largest):
    """What one split found, added to what those before it did: [R, WIDTH], [R], [R] float32. One without visible keys changes
    nothing, and none is changed that stands alone."""
    larger = tl.maximum(largest, more_largest)
    base = tl.where(larger == float("-inf"), 0.0, larger)
    kept, added = tl.exp2(largest - base), tl.exp2(more_largest - base)
    return found * kept[:, None] + more_found * added[:, None], total * kept + more_total * added, larger


@triton.jit
def _averaged(found, total, value_scale):
    return found * (value_scale / tl.where(total > 0.0, total, 1.0))[:, None]


@triton.jit
def _split_range(position, WINDOW: tl.constexpr, SPLIT: tl.constexpr):
    """First split that a query looks into."""
    return tl.maximum(position + 1 - WINDOW, 0) // SPLIT if WINDOW > 0 else position * 0


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=TABLES)
def rows_kernel(
    q, kv_cache, block_tables, query_starts, context_lens, kv_scales, out, attended, sums,
    num_requests, num_tiles, scale, q_stride, block_stride, table_stride, max_splits,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, REQUESTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program (tile and key head, share): every split of a tile, or, where programs share them, each so manieth of them."""
    wait_for_previous(EARLY)
    GROUP: tl.constexpr = H // K
    QUERIES: tl.constexpr = ROWS // GROUP
    kv_head, request, first_row, num_queries, first = tile_owner(query_starts, num_requests, num_tiles, K, QUERIES, REQUESTS)
    if first >= num_queries:
        return
    query, token_row, head, _live, inside = tile_rows(kv_head, first_row, num_queries, first, GROUP, D, ROWS, WIDTH)
    queries = tile_queries(q, q_stride, token_row, head, inside, D, WIDTH, kv_cache.dtype.element_ty)
    lane = tl.arange(0, WIDTH)
    value_scale = 1.0
    if kv_scales is not None:
        scale *= tl.load(kv_scales)
        value_scale = tl.load(kv_scales + 1)
    start = tl.load(context_lens + request) - num_queries
    position = start + query
    oldest = start + first
    newest = start + tl.minimum(first + QUERIES, num_queries) - 1  # -1 for a request without tokens
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(oldest + 1 - WINDOW, 0) // KEYS * KEYS
    first_split, end_split = begin // SPLIT, (newest + SPLIT) // SPLIT
    is_shared = tl.num_programs(1) > 1
    together = tl.where(is_shared, 1, end_split)
    last_run, step = tl.maximum(end_split, first_split + 1), tl.maximum(together, tl.num_programs(1))
    for run in tl.range(first_split + tl.program_id(1), last_run, step, num_stages=1, disable_licm=True):
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        found = tl.zeros([ROWS, WIDTH], tl.float32)
        for split in tl.range(run, tl.minimum(run + together, end_split), num_stages=1):
            more_found, more_total, more_largest = _attend(
                queries, kv_cache + kv_head * D, block_tables + request.to(tl.int64) * table_stride,
                tl.maximum(split * SPLIT, begin), tl.minimum(split * SPLIT + SPLIT, newest + 1), position, oldest, newest,
                scale, block_stride, 2 * K * D, K * D, D, P, WINDOW, SOFTCAP, KEYS,
            )  # fmt: skip
            found, total, largest = merged(found, total, largest, more_found, more_total, more_largest)
        # The rows anew, by a number that is read anew: kept from before the loop they would take the registers of its sums.
        again = tl.load(query_starts + request, volatile=True)
        own_query, own_row, own_head, there, stored = tile_rows(
            kv_head, again, num_queries, first + first_row - again, GROUP, D, ROWS, WIDTH
        )
        place = own_row * H + own_head
        if is_shared:
            # Numbered by the query's own first split, before which a neighbour may look.
            own_position = oldest - first + own_query
            number = run - _split_range(own_position, WINDOW, SPLIT)
            there = there & (number >= 0) & (run * SPLIT <= own_position)
            place = place * max_splits + number
            tl.store(attended + (place * D)[:, None] + lane[None, :], found, mask=stored & there[:, None])
            tl.store(sums + 2 * place, total, mask=there)
            tl.store(sums + 2 * place + 1, largest, mask=there)
        else:
            averaged = _averaged(found, total, value_scale)
            tl.store(out + (place * D)[:, None] + lane[None, :], averaged.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _attend(
    queries, keys, table, begin, end, position, oldest, newest, scale, block_stride,
    TOKEN_STRIDE: tl.constexpr, VALUE_OFFSET: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Tokens begin … end - 1 of one split: sums of weighted values and of weights, and the largest score. Every tile begins at
    a multiple of KEYS and is masked, and one of which a row sees nothing leaves it as it was."""
    ROWS: tl.constexpr = queries.shape[0]
    WIDTH: tl.constexpr = queries.shape[1]
    DOT: tl.constexpr = queries.dtype
    column = tl.arange(0, KEYS)
    lane = tl.arange(0, WIDTH)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    # The blocks of a tile are asked for while the tile before is at work.
    block = tl.load(table + (begin + column) // P, mask=begin + column < end, other=0)
    for first in range(begin, end, KEYS):
        token = first + column
        place = block.to(tl.int64) * block_stride + (token % P) * TOKEN_STRIDE
        block = tl.load(table + (token + KEYS) // P, mask=token + KEYS < end, other=0)
        places = keys + place[:, None] + lane[None, :]
        key = tl.load(places) if WIDTH == D else tl.load(places, mask=(lane < D)[None, :], other=0.0)
        score = tl.dot(queries, tl.trans(key.to(DOT)), input_precision="ieee") * scale
        if SOFTCAP > 0.0:
            score = SOFTCAP - 2.0 * SOFTCAP / (tl.exp2(score) + 1.0)
        seen = token[None, :] <= position[:, None]
        held = token <= newest
        if WINDOW > 0:
            seen = seen & (token[None, :] > (position - WINDOW)[:, None])
            held = held & (token > oldest - WINDOW)
        score = tl.where(seen, score, float("-inf"))
        larger = tl.maximum(largest, tl.max(score, 1))
        # Nothing seen yet: any number in the place of -inf makes all weights zero instead of NaN.
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weight = tl.exp2(score - base[:, None])
        faded = tl.exp2(largest - base)
        total = total * faded + tl.sum(weight, 1)
        value = tl.load(places + VALUE_OFFSET, mask=held[:, None] & (lane < D)[None, :], other=0.0)
        found = tl.dot(weight.to(DOT), value.to(DOT), found * faded[:, None], input_precision="ieee")
        largest = larger
    return found, total, largest


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=TABLES[1:])
def merge_rows_kernel(
    query_starts, context_lens, kv_scales, out, attended, sums, num_requests, max_splits,
    H: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr,
    TOGETHER: tl.constexpr, REQUESTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (query, head): its splits in their order, as `rows_kernel` merges them. Those beyond its last change nothing."""
    wait_for_previous(EARLY)
    token_row, head = tl.program_id(0), tl.program_id(1)
    request = tl.arange(0, REQUESTS)
    starts = tl.load(query_starts + request, mask=request < num_requests, other=0)
    request = tl.sum(((starts <= token_row) & (request < num_requests)).to(tl.int32), 0) - 1
    if request < 0:  # of nobody, as `tile_owner` says
        return
    behind = tl.load(query_starts + request + 1) - token_row
    position = tl.load(context_lens + request) - behind
    num_splits = (position + SPLIT) // SPLIT - _split_range(position, WINDOW, SPLIT)
    lane = tl.arange(0, WIDTH)
    one = tl.arange(0, 1)
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    found = tl.zeros([1, WIDTH], tl.float32)
    first = (token_row.to(tl.int64) * H + head) * max_splits
    for begin in range(0, num_splits, TOGETHER):
        for step in tl.static_range(TOGETHER):
            there = begin + step + one < num_splits
            place = first + begin + step + one
            inside = there[:, None] & (lane < D)[None, :]
            more_found = tl.load(attended + (place * D)[:, None] + lane[None, :], mask=inside, other=0.0)
            more_total = tl.load(sums + 2 * place, mask=there, other=0.0)
            more_largest = tl.load(sums + 2 * place + 1, mask=there, other=float("-inf"))
            found, total, largest = merged(found, total, largest, more_found, more_total, more_largest)
    value_scale = 1.0
    if kv_scales is not None:
        value_scale = tl.load(kv_scales + 1)
    averaged = _averaged(found, total, value_scale).to(out.dtype.element_ty)
    place = (token_row.to(tl.int64) * H + head) * D
    tl.store(out + place + one[:, None] * 0 + lane[None, :], averaged, mask=(lane < D)[None, :])
