"""Query tiles of chunked prefill: the request of a tile, and its rows, which are the queries of all heads of one KV head."""

from __future__ import annotations

import triton
import triton.language as tl


def max_query_tiles(num_rows: int, num_requests: int, queries: int) -> int:
    """The most tiles of `queries` queries of one KV head that the rows of requests may need: the numbers that `tile_owner`
    gives to tiles are below it."""
    return num_rows // queries + num_requests


@triton.jit
def tile_owner(query_starts, num_requests, num_tiles, K: tl.constexpr, QUERIES: tl.constexpr, REQUESTS: tl.constexpr):
    """→ KV head and request of a program, the request's first row and number of queries, and the tile's first query, which is ≥
    that number for an unused tile. Late tiles, which have the most keys, come first; adjacent programs have adjacent heads.

    Request b's tiles begin at number query_starts[b] // QUERIES + b, which leaves room for a partial last tile. Tiles before
    those of the first request are unused.
    """
    tile = num_tiles - 1 - tl.program_id(0) // K
    request = tl.arange(0, REQUESTS)
    first_tile = tl.load(query_starts + request, mask=request < num_requests, other=0) // QUERIES + request
    request = tl.maximum(tl.sum(((first_tile <= tile) & (request < num_requests)).to(tl.int32), 0) - 1, 0)
    first_row = tl.load(query_starts + request)
    num_queries = tl.load(query_starts + request + 1) - first_row
    first_query = (tile - (first_row // QUERIES + request)) * QUERIES
    first_query = tl.where(first_query < 0, num_queries, first_query)
    return tl.program_id(0) % K, request, first_row, num_queries, first_query


@triton.jit
def tile_rows(
    kv_head, first_row, num_queries, first_query, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """→ of each row of a tile, its query within the request, row of q and head: [ROWS] each; and masks of the valid rows [ROWS]
    and elements [ROWS, WIDTH]."""
    row = tl.arange(0, ROWS)
    query, head = first_query + row // GROUP, kv_head * GROUP + row % GROUP
    row_mask = (row < ROWS // GROUP * GROUP) & (query < num_queries)
    element_mask = row_mask[:, None] & (tl.arange(0, WIDTH) < D)[None, :]
    return query, (first_row + query).to(tl.int64), head, row_mask, element_mask


@triton.jit
def load_tile_queries(q, q_stride, token_row, head, element_mask, D: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    """→ the query rows of a tile in the dtype of the products: the cache's, or float16 with an fp8 cache: [ROWS, WIDTH]"""
    DOT: tl.constexpr = tl.float16 if DTYPE.primitive_bitwidth == 8 else DTYPE
    lane = tl.arange(0, WIDTH)
    return tl.load(q + token_row[:, None] * q_stride + (head * D)[:, None] + lane[None, :], mask=element_mask, other=0.0).to(
        DOT
    )


@triton.jit
def tile_key_range(start, first_query, num_queries, QUERIES, WINDOW, KEYS):
    """→ the first key of a tile, a multiple of KEYS, and the positions of its oldest and newest query. start: position of the
    request's first query; first_query: the tile's, relative to it. QUERIES, WINDOW and KEYS may be constants."""
    oldest = start + first_query
    newest = start + tl.minimum(first_query + QUERIES, num_queries) - 1
    begin = oldest * 0
    if WINDOW > 0:
        begin = tl.maximum(oldest + 1 - WINDOW, 0) // KEYS * KEYS
    return begin, oldest, newest
