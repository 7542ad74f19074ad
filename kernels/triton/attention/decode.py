"""Paged decode attention: the keys of each request are divided into splits, whose partial results are merged.

The grid depends on the card and the number of requests, not on lengths: every program computes its own range of splits from
`context_lens`. A captured graph therefore serves any lengths, and a batch of one long and many short requests is balanced over
the programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention_rows import AttentionShape
from kernels.triton.attention.decode_tiles import attend, attend_columns, empty_softmax_state
from kernels.triton.attention.newest_token import (
    NO_ROTATION,
    Rotation,
    attend_newest,
    load_angles,
    load_newest,
    rotate_and_store_newest,
)
from kernels.triton.attention.splits import (
    MERGE_CHUNK,
    MERGE_CONSTANTS,
    MERGE_WARPS,
    SPLIT_QUERIES,
    TABLES,
    DecodeWorkspace,
    decode_workspace,
    merge_kernel,
    plan_splits,
    schedule,
    scheduled_requests,
    shape_splits,
    shape_tiling,
    split_constants,
)
from kernels.triton.launching.card_properties import LOG2_E, multiprocessors
from kernels.triton.launching.early_launch import early_launch, wait_for_previous


@triton.jit(
    do_not_specialize=["num_requests", "table_stride", "max_splits", "resident_groups"], do_not_specialize_on_alignment=TABLES
)
def split_kernel(
    q, kv_cache, block_tables, context_lens, query_starts, kv_scales, cos, sin, slot_mapping, q_weight, k_weight, out,
    partial_out, partial_lse, num_requests, scale, q_stride, block_stride, table_stride, max_splits, resident_groups, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, ROTARY: tl.constexpr, QUERIES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr, REQUESTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program i processes KV head i % K, so that adjacent programs read adjacent heads of the same tokens at the same time.

    With ROTARY > 0, q is the unrotated QKV projection and each request has one query. The program of a request's last split
    also rotates its newest key and stores that key and value; only the tokens before it are read from the cache."""
    wait_for_previous(EARLY)
    kv_head = tl.program_id(0) % K
    request, split, num_items = schedule(
        context_lens, query_starts, num_requests, tl.program_id(0) // K, tl.num_programs(0) // K,
        resident_groups, WINDOW, QUERIES, TILE, SPLIT, REQUESTS,
    )  # fmt: skip
    GROUP: tl.constexpr = H // K
    row = tl.arange(0, ROWS)
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    lane = tl.arange(0, WIDTH)
    value_scale = 1.0
    if kv_scales is not None:
        scale *= tl.load(kv_scales)
        value_scale = tl.load(kv_scales + 1)
    # The next split's operands are prefetched, except for heads of 256: with an fp8 cache, registers do not suffice.
    PREFETCH: tl.constexpr = WIDTH <= 128
    if PREFETCH:
        block, begin, end, context_len, num_splits = _locate_split(
            block_tables, context_lens, request, split, num_items > 0, table_stride, resident_groups,
            P, ROTARY, QUERIES, WINDOW, TILE, SPLIT,
        )  # fmt: skip
        operands = _load_operands(
            q, cos, sin, slot_mapping, query_starts, request, split + 1 == num_splits, num_items > 0, query, head, kv_head,
            lane, q_stride, H, K, D, ROTARY,
        )  # fmt: skip
    for item in range(num_items):
        first_query, num_queries = request, 1
        if query_starts is not None:
            first_query = tl.load(query_starts + request)
            num_queries = tl.load(query_starts + request + 1) - first_query
        if not PREFETCH:
            block, begin, end, context_len, num_splits = _locate_split(
                block_tables, context_lens, request, split, num_items > 0, table_stride, resident_groups,
                P, ROTARY, QUERIES, WINDOW, TILE, SPLIT,
            )  # fmt: skip
            if ROTARY > 0:
                operands = _load_operands(
                    q, cos, sin, slot_mapping, query_starts, request, split + 1 == num_splits, num_items > 0, query, head,
                    kv_head, lane, q_stride, H, K, D, ROTARY,
                )  # fmt: skip
            else:  # `_load_operands` would load the query range again, for which registers do not suffice either
                operands = _load_queries(q, first_query, num_queries, query, head, lane, q_stride, D)
        row_mask = query < num_queries
        token_row = (first_query + query).to(tl.int64)
        out_mask = row_mask[:, None] & (lane < D)[None, :]
        is_last = split + 1 == num_splits
        if ROTARY > 0:
            newest, angles = operands
            queries, key, value = rotate_and_store_newest(
                newest, angles, q_weight, k_weight, kv_cache, kv_scales, kv_head, lane, block_stride, eps, K, D, P, ROTARY
            )
            state = attend_newest(queries, key, value, is_last & (context_len > 0), scale, SOFTCAP, TILE)
        else:
            queries = operands
            state = empty_softmax_state(queries, kv_cache, TILE)
        # Up to `COLUMNS_MAX` queries over an fp8 cache are the columns of the matrix products, not their rows.
        attend_tiles: tl.constexpr = attend_columns if ROWS < 16 else attend
        acc, acc_odd, weight_sums, row_max = attend_tiles(
            queries, state, block, kv_cache + kv_head * D, block_tables + request.to(tl.int64) * table_stride, begin, end,
            context_len - num_queries + 1, context_len - (num_queries - 1 - query), scale, block_stride, 2 * K * D, K * D, D,
            P, QUERIES, WINDOW, SOFTCAP, TILE,
        )  # fmt: skip
        next_request, next_split = tl.where(is_last, request + 1, request), tl.where(is_last, 0, split + 1)
        next_splits = num_splits
        if PREFETCH:
            has_next = item + 1 < num_items
            block, begin, end, context_len, next_splits = _locate_split(
                block_tables, context_lens, next_request, next_split, has_next, table_stride, resident_groups,
                P, ROTARY, QUERIES, WINDOW, TILE, SPLIT,
            )  # fmt: skip
            operands = _load_operands(
                q, cos, sin, slot_mapping, query_starts, next_request, next_split + 1 == next_splits, has_next, query, head,
                kv_head, lane, q_stride, H, K, D, ROTARY,
            )  # fmt: skip
        if kv_cache.dtype.element_ty.primitive_bitwidth == 8:
            acc = tl.reshape(tl.join(acc, acc_odd), [ROWS, WIDTH])
        row_sum = tl.sum(weight_sums, 1)
        divisor = tl.where(row_sum > 0.0, row_sum, 1.0)  # no visible key: acc is zero
        acc *= (value_scale / divisor)[:, None]
        if num_splits == 1:
            offset = (token_row * H + head) * D
            tl.store(out + offset[:, None] + lane[None, :], acc.to(out.dtype.element_ty), mask=out_mask)
        else:
            offset = (token_row * max_splits + split) * H + head
            tl.store(partial_out + (offset * D)[:, None] + lane[None, :], acc, mask=out_mask)
            tl.store(partial_lse + offset, row_max + tl.log2(divisor), mask=row_mask)
        request, split, num_splits = next_request, next_split, next_splits


@triton.jit
def _locate_split(
    block_tables, context_lens, request, split, is_valid, table_stride, resident_groups,
    P: tl.constexpr, ROTARY: tl.constexpr, QUERIES: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """→ the blocks of a split's first tile [TILE], the range of its cached tokens, its request's length and number of splits.
    An invalid split loads nothing. With ROTARY > 0 the newest token is not in the cache yet."""
    context_len = tl.load(context_lens + request, mask=is_valid, other=0)
    first_token, tiles, num_splits = plan_splits(context_len, resident_groups, WINDOW, QUERIES, TILE, SPLIT)
    begin = first_token + split * tiles * TILE
    end = tl.minimum(begin + tiles * TILE, context_len - (1 if ROTARY > 0 else 0))
    column = tl.arange(0, TILE)
    table = block_tables + request.to(tl.int64) * table_stride
    block = tl.load(table + begin // P + column // P, mask=begin + column < end, other=0)
    return block, begin, end, context_len, num_splits


@triton.jit
def _load_operands(
    q, cos, sin, slot_mapping, query_starts, request, is_last, is_valid, query, head, kv_head, lane, q_stride,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """→ the query rows of a split, [ROWS, WIDTH]; with ROTARY > 0, the inputs of `rotate_and_store_newest`."""
    if ROTARY > 0:
        is_last_valid = is_last & is_valid
        newest = load_newest(q, request, is_valid, is_last_valid, head, query < 1, kv_head, lane, q_stride, H, K, D, ROTARY)
        operands = newest, load_angles(cos, sin, slot_mapping, request, is_valid, is_last_valid, lane, ROTARY)
    else:
        first_query, num_queries = _query_range(query_starts, request, is_valid)
        operands = _load_queries(q, first_query, num_queries, query, head, lane, q_stride, D)
    return operands


@triton.jit
def _query_range(query_starts, request, is_valid):
    """→ first row and number of rows of a request; an invalid one has no rows."""
    first_query, num_queries = request, is_valid.to(tl.int32)
    if query_starts is not None:
        first_query = tl.load(query_starts + request, mask=is_valid, other=0)
        num_queries = tl.load(query_starts + request + 1, mask=is_valid, other=0) - first_query
    return first_query, num_queries


@triton.jit
def _load_queries(q, first_query, num_queries, query, head, lane, q_stride, D: tl.constexpr):
    """→ query rows [ROWS, WIDTH], zeros outside"""
    token_row = (first_query + query).to(tl.int64)
    in_range = (query < num_queries)[:, None] & (lane < D)[None, :]
    return tl.load(q + token_row[:, None] * q_stride + (head * D)[:, None] + lane[None, :], mask=in_range, other=0.0)


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
    """out[b, h] = Σ softmax(scale · q[b, h] · k[t]) · v[t] over the tokens t of request b in its window.

    Flash-Decoding (arXiv 2311.01282) over pages (arXiv 2309.06180), with the query heads of a KV head as the rows of a matrix
    tile (arXiv 2305.13245); online softmax in base 2 (arXiv 2205.14135); soft-cap of arXiv 2408.00118.

    q: [T, H, D] fp16, bf16 or fp32, rows need not be contiguous; kv_cache: [N, P, 2, K, D] of q's dtype, or float8_e4m3fn with
    kv_scales [2] float32 (of keys, of values; None is 1); block_tables: [B, M] int32; context_lens: [B] int32, 0 reads nothing
    and gives zeros. Without `query_starts` T is B and row b is request b's newest token. With it ([B + 1] int32), rows
    query_starts[b] … query_starts[b + 1] - 1, at most `max_query_len`, are the newest tokens of request b, each of which
    attends to itself and the tokens before it (drafts under verification); every row belongs to a request, and requests
    without rows come last. With context 0, any number of queries gives zeros.

    Bytes: all visible keys and values, once per request; 4 · (D + 1) · H per split and query, written and read again.
    Operations: 4 · D · H per visible token of a query. Tokens beyond a request's length or before its window are neither read
    nor counted. Scores, sums of weights and outputs in float32; weights are rounded to the cache's dtype (float16 for an fp8
    cache) for the second product.

    A split's size depends only on the length of its request, and splits are merged in order, so a row's result has the same
    bits in any batch. No lengths are read on the host; with `out` and `workspace` nothing is allocated.
    """
    check_attention(q, kv_cache, shape)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    assert (max_query_len == 1) == (query_starts is None), "query_starts is given exactly if max_query_len > 1"
    assert max_query_len <= SPLIT_QUERIES[-1], "splits of a window are sized for fewer queries"
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
    """Launches `split_kernel` and `merge_kernel`. rotation: for `rotated_decode`, in which case q is the QKV projection."""
    num_requests, max_blocks = block_tables.shape
    if num_requests == 0:
        return
    *rotation_tensors, eps, rotary_dim = rotation or NO_ROTATION
    tiling = shape_tiling(shape, kv_cache.dtype, max_query_len, q.device)
    if rotary_dim:
        tiling = tiling.rotated
    if workspace is None:
        workspace = decode_workspace(shape, q.shape[0], max_blocks, kv_cache.dtype, q.device)
    assert out.is_contiguous(), "out must be contiguous"
    rows, splits, *_ = workspace.partial_out.shape
    assert rows >= q.shape[0], "the workspace has too few rows"
    assert splits >= shape_splits(shape, max_blocks, tiling), "the workspace has too few splits"
    kv_heads = shape.num_kv_heads
    resident_groups = max(1, multiprocessors(q.device) * tiling.programs // kv_heads)
    constants = split_constants(shape, max_query_len, kv_cache.element_size(), tiling)
    requests = scheduled_requests(num_requests)
    split_kernel[(min(resident_groups, num_requests * splits) * kv_heads,)](
        q, kv_cache, block_tables, context_lens, query_starts, kv_scales, *rotation_tensors, out, *workspace,
        num_requests, score_factor(shape), q.stride(0), kv_cache.stride(0), block_tables.stride(0), splits, resident_groups,
        eps, **constants, ROTARY=rotary_dim, REQUESTS=requests, **early_launch(q.device, q.shape[0]),
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, maxnreg=tiling.registers_max,
    )  # fmt: skip
    merge_kernel[(q.shape[0], shape.num_heads)](
        context_lens, query_starts, out, *workspace, num_requests, splits, resident_groups,
        **{name: constants[name] for name in MERGE_CONSTANTS}, REQUESTS=1 if query_starts is None else requests,
        CHUNK=MERGE_CHUNK, num_warps=MERGE_WARPS, **early_launch(q.device, q.shape[0]),
    )  # fmt: skip


def score_factor(shape: AttentionShape) -> float:
    """The factor from a product q · k to its base-2 score or, with a soft-cap, to the exponent from which tanh is computed."""
    scale = shape.product_scale
    return scale * LOG2_E if shape.softcap is None else 2.0 * LOG2_E * scale / shape.softcap


def check_attention(q: torch.Tensor, kv_cache: torch.Tensor, shape: AttentionShape) -> None:
    """Raises AssertionError unless q and the cache have the layout that the kernels of paged attention assume."""
    heads, size = shape.num_kv_heads, shape.head_dim
    assert shape.causal, "paged attention is causal"
    assert q.stride()[1:] == (size, 1), "the heads of a row of q must be contiguous"
    assert kv_cache.shape[1:] == (shape.block_size, 2, heads, size), "the cache has another shape"
    assert kv_cache.stride()[1:] == (2 * heads * size, heads * size, size, 1), "a block must be contiguous"
