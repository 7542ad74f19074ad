"""Paged attention of the newest token of each request: a request's keys are cut into splits, whose results are merged.

The grid depends only on the card, never on lengths: every program derives its own splits from `context_lens`. So a captured
graph serves any lengths, and the programs share the work of a batch with one long and many short requests evenly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention_rows import AttentionShape
from kernels.triton.attention_splits import (
    MERGE_CHUNK,
    MERGE_CONSTANTS,
    MERGE_WARPS,
    SPLIT_QUERIES,
    TABLES,
    DecodeWorkspace,
    decode_workspace,
    merge_kernel,
    schedule,
    scheduled_requests,
    shape_splits,
    shape_tiling,
    split_constants,
    splits_of,
)
from kernels.triton.decode_tiles import attend, attend_columns, see_nothing
from kernels.triton.early_launch import early_launch, wait_for_previous
from kernels.triton.newest_token import NO_ROTATION, Rotation, ask_angles, ask_newest, see_newest, take_newest
from kernels.triton.tuning import LOG2_E, multiprocessors

__all__ = ["DecodeWorkspace", "check_attention", "decode_workspace", "paged_decode", "score_factor"]


@triton.jit(
    do_not_specialize=["num_requests", "table_stride", "max_splits", "card_groups"], do_not_specialize_on_alignment=TABLES
)
def split_kernel(
    q, kv_cache, block_tables, context_lens, query_starts, kv_scales, cos, sin, slot_mapping, q_weight, k_weight, out,
    attended, log_weights, num_requests, scale, q_stride, block_stride, table_stride, max_splits, card_groups, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, ROTARY: tl.constexpr, QUERIES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr, REQUESTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program i works on key head i % K, so that neighbours read neighbouring heads of the same tokens at the same time.

    With ROTARY > 0 q is the whole projection as it comes, and each request has one query: the program of its last split
    rotates its key as well and stores key and value, and the cache is read as far as the token before."""
    wait_for_previous(EARLY)
    kv_head = tl.program_id(0) % K
    request, split, num_items = schedule(
        context_lens, query_starts, num_requests, tl.program_id(0) // K, tl.num_programs(0) // K,
        card_groups, WINDOW, QUERIES, TILE, SPLIT, REQUESTS,
    )  # fmt: skip
    GROUP: tl.constexpr = H // K
    row = tl.arange(0, ROWS)
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    lane = tl.arange(0, WIDTH)
    value_scale = 1.0
    if kv_scales is not None:
        scale *= tl.load(kv_scales)
        value_scale = tl.load(kv_scales + 1)
    # What a split begins with is asked for while the one before it ends. Heads of 256 over an fp8 cache lack registers for it.
    AHEAD: tl.constexpr = WIDTH <= 128
    if AHEAD:
        block, begin, end, context_len, num_splits = _first_tile(
            block_tables, context_lens, request, split, num_items > 0, table_stride, card_groups,
            P, ROTARY, QUERIES, WINDOW, TILE, SPLIT,
        )  # fmt: skip
        asked = _ask(
            q, cos, sin, slot_mapping, query_starts, request, split + 1 == num_splits, num_items > 0, query, head, kv_head,
            lane, q_stride, H, K, D, ROTARY,
        )  # fmt: skip
    for item in range(num_items):
        first_query, num_queries = request, 1
        if query_starts is not None:
            first_query = tl.load(query_starts + request)
            num_queries = tl.load(query_starts + request + 1) - first_query
        if not AHEAD:
            block, begin, end, context_len, num_splits = _first_tile(
                block_tables, context_lens, request, split, num_items > 0, table_stride, card_groups,
                P, ROTARY, QUERIES, WINDOW, TILE, SPLIT,
            )  # fmt: skip
            if ROTARY > 0:
                asked = _ask(
                    q, cos, sin, slot_mapping, query_starts, request, split + 1 == num_splits, num_items > 0, query, head,
                    kv_head, lane, q_stride, H, K, D, ROTARY,
                )  # fmt: skip
            else:  # `_ask` would read the rows a second time, for which these kernels lack registers too
                asked = _queries(q, first_query, num_queries, query, head, lane, q_stride, D)
        live = query < num_queries
        token_row = (first_query + query).to(tl.int64)
        inside = live[:, None] & (lane < D)[None, :]
        is_last = split + 1 == num_splits
        if ROTARY > 0:
            newest, angles = asked
            queries, key, value = take_newest(
                newest, angles, q_weight, k_weight, kv_cache, kv_scales, kv_head, lane, block_stride, eps, K, D, P, ROTARY
            )
            seen = see_newest(queries, key, value, is_last & (context_len > 0), scale, SOFTCAP, TILE)
        else:
            queries = asked
            seen = see_nothing(queries, kv_cache, TILE)
        # Columns of products instead of their rows: `COLUMNS_MAX` queries over an fp8 cache.
        see_tiles: tl.constexpr = attend_columns if ROWS < 16 else attend
        found, found_odd, weights, largest = see_tiles(
            queries, seen, block, kv_cache + kv_head * D, block_tables + request.to(tl.int64) * table_stride, begin, end,
            context_len - num_queries + 1, context_len - (num_queries - 1 - query), scale, block_stride, 2 * K * D, K * D, D,
            P, QUERIES, WINDOW, SOFTCAP, TILE,
        )  # fmt: skip
        next_request, next_split = tl.where(is_last, request + 1, request), tl.where(is_last, 0, split + 1)
        next_splits = num_splits
        if AHEAD:
            more = item + 1 < num_items
            block, begin, end, context_len, next_splits = _first_tile(
                block_tables, context_lens, next_request, next_split, more, table_stride, card_groups,
                P, ROTARY, QUERIES, WINDOW, TILE, SPLIT,
            )  # fmt: skip
            asked = _ask(
                q, cos, sin, slot_mapping, query_starts, next_request, next_split + 1 == next_splits, more, query, head,
                kv_head, lane, q_stride, H, K, D, ROTARY,
            )  # fmt: skip
        if kv_cache.dtype.element_ty.primitive_bitwidth == 8:
            found = tl.reshape(tl.join(found, found_odd), [ROWS, WIDTH])
        weight = tl.sum(weights, 1)
        positive = tl.where(weight > 0.0, weight, 1.0)  # nothing was seen: zeros, whatever they are divided by
        found *= (value_scale / positive)[:, None]
        if num_splits == 1:
            place = (token_row * H + head) * D
            tl.store(out + place[:, None] + lane[None, :], found.to(out.dtype.element_ty), mask=inside)
        else:
            place = (token_row * max_splits + split) * H + head
            tl.store(attended + (place * D)[:, None] + lane[None, :], found, mask=inside)
            tl.store(log_weights + place, largest + tl.log2(positive), mask=live)
        request, split, num_splits = next_request, next_split, next_splits


@triton.jit
def _first_tile(
    block_tables, context_lens, request, split, is_there, table_stride, card_groups,
    P: tl.constexpr, ROTARY: tl.constexpr, QUERIES: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """→ blocks of a split's first tile, where its tokens in the cache begin and end, its request's length and number of splits.
    Nothing is read of one that is not there. The newest token is not in the cache where ROTARY > 0."""
    context_len = tl.load(context_lens + request, mask=is_there, other=0)
    first, tiles, num_splits = splits_of(context_len, card_groups, WINDOW, QUERIES, TILE, SPLIT)
    begin = first + split * tiles * TILE
    end = tl.minimum(begin + tiles * TILE, context_len - (1 if ROTARY > 0 else 0))
    column = tl.arange(0, TILE)
    table = block_tables + request.to(tl.int64) * table_stride
    block = tl.load(table + begin // P + column // P, mask=begin + column < end, other=0)
    return block, begin, end, context_len, num_splits


@triton.jit
def _ask(
    q, cos, sin, slot_mapping, query_starts, request, is_last, is_there, query, head, kv_head, lane, q_stride,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """→ the rows that a split is attended by, [ROWS, WIDTH], or what `take_newest` makes them of."""
    if ROTARY > 0:
        last = is_last & is_there
        newest = ask_newest(q, request, is_there, last, head, query < 1, kv_head, lane, q_stride, H, K, D, ROTARY)
        asked = newest, ask_angles(cos, sin, slot_mapping, request, is_there, last, lane, ROTARY)
    else:
        first_query, num_queries = _rows(query_starts, request, is_there)
        asked = _queries(q, first_query, num_queries, query, head, lane, q_stride, D)
    return asked


@triton.jit
def _rows(query_starts, request, is_there):
    """→ first row and number of rows of a request, which has none where it is not there."""
    first_query, num_queries = request, is_there.to(tl.int32)
    if query_starts is not None:
        first_query = tl.load(query_starts + request, mask=is_there, other=0)
        num_queries = tl.load(query_starts + request + 1, mask=is_there, other=0) - first_query
    return first_query, num_queries


@triton.jit
def _queries(q, first_query, num_queries, query, head, lane, q_stride, D: tl.constexpr):
    """→ [ROWS, WIDTH]"""
    token_row = (first_query + query).to(tl.int64)
    inside = (query < num_queries)[:, None] & (lane < D)[None, :]
    return tl.load(q + token_row[:, None] * q_stride + (head * D)[:, None] + lane[None, :], mask=inside, other=0.0)


def paged_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    shape: AttentionShape,
    *,
    query_starts: torch.Tensor | None = None,
    max_query_len: int = 1,
    kv_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
) -> torch.Tensor:
    """out[b, h] = Σ softmax(scale · q[b, h] · k[t]) · v[t] over the tokens t of request b that its window holds.

    Flash-Decoding (arXiv 2311.01282) over pages (arXiv 2309.06180), with the query heads of a key head as the rows of a matrix
    tile (arXiv 2305.13245); online softmax in base 2 (arXiv 2205.14135); soft-cap of arXiv 2408.00118.

    q: [T, H, D] fp16, bf16 or fp32, rows need not be contiguous; kv_cache: [N, P, 2, K, D] of q's dtype, or float8_e4m3fn with
    kv_scales [2] float32 (of keys, of values; None is 1); block_tables: [B, M] int32; context_lens: [B] int32, 0 reads nothing
    and gives zeros. Without `query_starts` T is B and row b is request b's newest token. With it ([B + 1] int32), rows
    query_starts[b] … query_starts[b + 1] - 1, at most `max_query_len`, are the newest tokens of request b, each of which sees
    itself and the tokens before it (guesses that are verified); every row belongs to a request, and requests without rows come
    last. With context 0, any number of queries gives zeros.

    Bytes: all visible keys and values, once per request; 4 · D · H per split and query, written and read again. Operations: 4 ·
    D · H per token that a query sees. Tokens beyond a request's length or before its window are neither read nor counted.
    Scores, sums of weights and outputs in float32; weights are rounded to the cache's dtype (float16 for an fp8 cache) for the
    second product.

    A split's size depends only on the length of its request, and splits are merged in order, so a row's result has the same
    bits in any batch. No lengths are read on the host; with `out` and `workspace` nothing is allocated.
    """
    check_attention(q, kv_cache, shape)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    assert (max_query_len == 1) == (query_starts is None), "rows of several queries have beginnings"
    assert max_query_len <= SPLIT_QUERIES[-1], "the splits of a window have no room for so many queries"
    launch_decode(
        q, kv_cache, block_tables, context_lens, shape, out, workspace,
        query_starts=query_starts, max_query_len=max_query_len, kv_scales=kv_scales,
    )  # fmt: skip
    return out


def launch_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    shape: AttentionShape,
    out: torch.Tensor,
    workspace: DecodeWorkspace | None,
    *,
    query_starts: torch.Tensor | None = None,
    max_query_len: int = 1,
    kv_scales: torch.Tensor | None = None,
    rotation: Rotation | None = None,
) -> None:
    """rotation: for `rotated_decode`, in which case q is the whole projection."""
    num_requests, max_blocks = block_tables.shape
    if num_requests == 0:
        return
    *given, eps, rotary_dim = rotation or NO_ROTATION
    tiling = shape_tiling(shape, kv_cache.dtype, max_query_len, q.device)
    if rotary_dim:
        tiling = tiling.rotated
    if workspace is None:
        workspace = decode_workspace(shape, q.shape[0], max_blocks, kv_cache.dtype, q.device)
    assert out.is_contiguous(), "outputs of decodes lie together"
    rows, splits, *_ = workspace.attended.shape
    assert rows >= q.shape[0], "the workspace has too few rows"
    assert splits >= shape_splits(shape, max_blocks, tiling), "the workspace has too few splits"
    kv_heads = shape.num_kv_heads
    groups = max(1, multiprocessors(q.device) * tiling.programs // kv_heads)
    constants = split_constants(shape, max_query_len, kv_cache.element_size(), tiling)
    requests = scheduled_requests(num_requests)
    split_kernel[(min(groups, num_requests * splits) * kv_heads,)](
        q, kv_cache, block_tables, context_lens, query_starts, kv_scales, *given, out, *workspace,
        num_requests, score_factor(shape), q.stride(0), kv_cache.stride(0), block_tables.stride(0), splits, groups, eps,
        **constants, ROTARY=rotary_dim, REQUESTS=requests, **early_launch(q.device, q.shape[0]),
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, maxnreg=tiling.registers_max,
    )  # fmt: skip
    merge_kernel[(q.shape[0], shape.num_heads)](
        context_lens, query_starts, out, *workspace, num_requests, splits, groups,
        **{name: constants[name] for name in MERGE_CONSTANTS}, REQUESTS=1 if query_starts is None else requests,
        CHUNK=MERGE_CHUNK, num_warps=MERGE_WARPS, **early_launch(q.device, q.shape[0]),
    )  # fmt: skip


def score_factor(shape: AttentionShape) -> float:
    """The factor for products: to the base-2 score or, with a soft-cap, to the exponent from which its tanh is computed."""
    scale = shape.product_scale
    return scale * LOG2_E if shape.softcap is None else 2.0 * LOG2_E * scale / shape.softcap


def check_attention(q: torch.Tensor, kv_cache: torch.Tensor, shape: AttentionShape) -> None:
    heads, size = shape.num_kv_heads, shape.head_dim
    assert shape.causal, "a cache holds what comes before; whole texts are attended elsewhere"
    assert q.stride()[1:] == (size, 1), "a row's heads lie together"
    assert kv_cache.shape[1:] == (shape.block_size, 2, heads, size), "the cache has another shape"
    assert kv_cache.stride()[1:] == (2 * heads * size, heads * size, size, 1), "a block is one piece of memory"
