"""Query tiles of chunked prefill: the request of a tile, and its rows, the queries of all heads that share one key head."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_owner(query_starts, num_requests, num_tiles, K: tl.constexpr, QUERIES: tl.constexpr, REQUESTS: tl.constexpr):
    """→ key head and request of a program, the request's first row and number of queries, and the tile's first query, which is
    beyond them where a tile is nobody's. Late tiles, which see most, come first; neighbours have neighbouring heads.

    Request b's tiles begin at query_starts[b] // QUERIES + b: room enough for a last tile that is not full. Those before the
    first request's are nobody's.
    """
    tile = num_tiles - 1 - tl.program_id(0) // K
    request = tl.arange(0, REQUESTS)
    first_tile = tl.load(query_starts + request, mask=request < num_requests, other=0) // QUERIES + request
    request = tl.maximum(tl.sum(((first_tile <= tile) & (request < num_requests)).to(tl.int32), 0) - 1, 0)
    first_row = tl.load(query_starts + request)
    num_queries = tl.load(query_starts + request + 1) - first_row
    first = (tile - (first_row // QUERIES + request)) * QUERIES
    first = tl.where(first < 0, num_queries, first)
    return tl.program_id(0) % K, request, first_row, num_queries, first


@triton.jit
def tile_rows(
    kv_head, first_row, num_queries, first, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """→ of each row of a tile: its query within the request, row of q, and head: [ROWS]; whether there is one: [ROWS], and
    [ROWS, WIDTH] for its numbers."""
    row = tl.arange(0, ROWS)
    query, head = first + row // GROUP, kv_head * GROUP + row % GROUP
    live = (row < ROWS // GROUP * GROUP) & (query < num_queries)
    inside = live[:, None] & (tl.arange(0, WIDTH) < D)[None, :]
    return query, (first_row + query).to(tl.int64), head, live, inside


@triton.jit
def tile_queries(q, q_stride, token_row, head, inside, D: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    """→ the rows of a tile as they are multiplied with what the cache holds, float16 for codes of 8 bits: [ROWS, WIDTH]"""
    DOT: tl.constexpr = tl.float16 if DTYPE.primitive_bitwidth == 8 else DTYPE
    lane = tl.arange(0, WIDTH)
    return tl.load(q + token_row[:, None] * q_stride + (head * D)[:, None] + lane[None, :], mask=inside, other=0.0).to(DOT)


@triton.jit
def tile_keys(start, first, num_queries, QUERIES, WINDOW, KEYS):
    """→ where the keys of a tile begin, a multiple of KEYS, and the positions of its oldest and newest query. start: position
    of the request's first query; first: the tile's, counted from there. QUERIES, WINDOW and KEYS may be constants."""
    oldest = start + first
    newest = start + tl.minimum(first + QUERIES, num_queries) - 1
    begin = oldest * 0
    if WINDOW > 0:
        begin = tl.maximum(oldest + 1 - WINDOW, 0) // KEYS * KEYS
    return begin, oldest, newest
