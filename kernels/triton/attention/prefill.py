"""Paged causal attention of prompt chunks: tiles of queries of all heads of one KV head, over the keys up to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.attention_rows import AttentionShape
from kernels.triton.attention import chunk_splits
from kernels.triton.attention.chunk_splits import plan_tile_splits
from kernels.triton.attention.decode import check_attention, paged_decode, score_factor
from kernels.triton.attention.query_tiles import load_tile_queries, max_query_tiles, tile_key_range, tile_owner, tile_rows
from kernels.triton.attention.splits import (
    SPLIT_QUERIES,
    TABLES,
    DecodeWorkspace,
    scheduled_requests,
    shape_constants,
    workspace_bytes,
)
from kernels.triton.launching.card_properties import HOPPER, capability, card, has_gluon, multiprocessors, power_of_two

SPLIT_BYTES_MAX = 256 * 1024 * 1024
"""Memory that splitting the keys of short chunks may take beyond the workspace of decodes. Many short chunks beside one very
long request are processed in prefill tiles instead."""


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """Tiles of `rows` queries, counting those of all heads of a KV head, and `keys` keys at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    programs: int = 1  # per multiprocessor, at least


def prefill_tiling(head_dim: int, kv_bytes: int, rows: int, windowed: bool, capability: int) -> PrefillTiling:
    """rows: queries of the longest chunk times the heads of a group. With 128 rows per load of keys and values, an H200's L2
    bandwidth suffices; two groups of four warps hold 64 of the rows each. Shorter chunks have smaller tiles. float32 has no
    matrix instructions: its operands are in registers, which suffice only for small tiles."""
    if kv_bytes == 4:
        return PrefillTiling(min(max(16, power_of_two(rows)), 32), 16, 8, 2)
    width = power_of_two(head_dim)
    is_small = card(capability).is_small
    tile_rows = 16 if rows <= 16 else 64 if rows <= 64 or is_small else 128
    if width >= 256:  # the accumulators fill the registers of four warps
        return PrefillTiling(min(tile_rows, 64), 32, 8, 2 if is_small else 3)
    keys = min(64, 4096 // width) if capability < 90 or is_small else 128 if tile_rows != 64 and not windowed else 64
    if tile_rows == 128:
        return PrefillTiling(tile_rows, keys, 8, 3)
    is_light = width * kv_bytes <= 128 if is_small else keys < 128
    return PrefillTiling(tile_rows, keys, 4, 3, programs=2 if is_light else 1)


@triton.jit(
    do_not_specialize=["num_requests", "num_tiles", "table_stride", "max_splits"], do_not_specialize_on_alignment=TABLES
)
def prefill_kernel(
    q,
    kv_cache,
    block_tables,
    query_starts,
    context_lens,
    kv_scales,
    out,
    partial_out,
    partial_lse,
    num_requests,
    num_tiles,
    scale,
    q_stride,
    block_stride,
    table_stride,
    max_splits,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """One tile of queries for one KV head; with SPLIT > 0, one split of its keys (`chunk_splits`)."""
    GROUP: tl.constexpr = H // K
    QUERIES: tl.constexpr = ROWS // GROUP
    kv_head, request, first_row, num_queries, first_query = tile_owner(
        query_starts, num_requests, num_tiles, K, QUERIES, REQUESTS
    )
    if first_query >= num_queries:
        return
    query, token_row, head, row_mask, element_mask = tile_rows(
        kv_head, first_row, num_queries, first_query, GROUP, D, ROWS, WIDTH
    )
    queries = load_tile_queries(q, q_stride, token_row, head, element_mask, D, WIDTH, kv_cache.dtype.element_ty)
    lane = tl.arange(0, WIDTH)
    value_scale = 1.0
    if kv_scales is not None:
        scale *= tl.load(kv_scales)
        value_scale = tl.load(kv_scales + 1)
    # Positions of the queries. Without a window, keys up to `oldest` are visible to all of them; keys after `newest` to none.
    start = tl.load(context_lens + request) - num_queries
    position = start + query
    begin, oldest, newest = tile_key_range(start, first_query, num_queries, QUERIES, WINDOW, KEYS)
    end, unmasked_begin = newest + 1, begin
    if WINDOW > 0:
        unmasked_begin = tl.minimum((tl.maximum(newest + 1 - WINDOW, 0) + KEYS - 1) // KEYS * KEYS, newest + 1)
    if SPLIT > 0:
        split = tl.program_id(1)
        tiles, num_splits = plan_tile_splits(begin, newest, max_splits, KEYS, SPLIT)
        if split >= num_splits:
            return
        begin += split * tiles * KEYS
        end = tl.minimum(begin + tiles * KEYS, end)
        unmasked_begin = tl.minimum(tl.maximum(unmasked_begin, begin), end) if WINDOW > 0 else begin
    unmasked_end = tl.maximum((oldest + 1) // KEYS * KEYS, unmasked_begin)
    if SPLIT > 0:
        unmasked_end = tl.minimum(unmasked_end, end)
    keys = kv_cache + kv_head * D
    table = block_tables + request.to(tl.int64) * table_stride
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    if WINDOW > 0:
        acc, row_sum, row_max = _accumulate_tiles(
            acc, row_sum, row_max, queries, keys, table, begin, unmasked_begin, position, oldest, newest, scale, block_stride,
            2 * K * D, K * D, D, P, WINDOW, SOFTCAP, KEYS, True,
        )  # fmt: skip
    acc, row_sum, row_max = _accumulate_tiles(
        acc, row_sum, row_max, queries, keys, table, unmasked_begin, unmasked_end, position, oldest, newest, scale,
        block_stride, 2 * K * D, K * D, D, P, WINDOW, SOFTCAP, KEYS, False,
    )  # fmt: skip
    acc, row_sum, row_max = _accumulate_tiles(
        acc, row_sum, row_max, queries, keys, table, unmasked_end, end, position, oldest, newest, scale, block_stride,
        2 * K * D, K * D, D, P, WINDOW, SOFTCAP, KEYS, True,
    )  # fmt: skip
    divisor = tl.where(row_sum > 0.0, row_sum, 1.0)  # no visible key: acc is zero
    acc *= (value_scale / divisor)[:, None]
    if SPLIT > 0:  # noqa: SIM102 - a constant; the rest is defined only then
        if num_splits > 1:
            offset = (token_row * max_splits + split) * H + head
            tl.store(partial_out + (offset * D)[:, None] + lane[None, :], acc, mask=element_mask)
            tl.store(partial_lse + offset, row_max + tl.log2(divisor), mask=row_mask)
            return
    offset = (token_row * H + head) * D
    tl.store(out + offset[:, None] + lane[None, :], acc.to(out.dtype.element_ty), mask=element_mask)


@triton.jit
def _accumulate_tiles(
    acc,
    row_sum,
    row_max,
    queries,
    keys,
    table,
    begin,
    end,
    position,
    oldest,
    newest,
    scale,
    block_stride,
    TOKEN_STRIDE: tl.constexpr,
    VALUE_OFFSET: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Continues the online softmax over the tiles of keys that begin between `begin` and `end` - 1, each at a multiple of KEYS.
    Without MASKED, all of their keys are visible to all queries."""
    WIDTH: tl.constexpr = queries.shape[1]
    DOT: tl.constexpr = queries.dtype
    column = tl.arange(0, KEYS)
    lane = tl.arange(0, WIDTH)
    # Block numbers are loaded one tile ahead.
    block = tl.load(table + begin // P + column // P, mask=begin + column < end, other=0)
    for start in range(begin, end, KEYS):
        token = start + column
        if KEYS >= P:
            offsets = block.to(tl.int64) * block_stride + (column % P) * TOKEN_STRIDE
        else:
            offsets = block.to(tl.int64) * block_stride + (start % P + column) * TOKEN_STRIDE
        block = tl.load(table + (start + KEYS) // P + column // P, mask=token + KEYS < end, other=0)
        key_ptrs = keys + offsets[:, None] + lane[None, :]
        key = tl.load(key_ptrs) if WIDTH == D else tl.load(key_ptrs, mask=(lane < D)[None, :], other=0.0)
        score = tl.dot(queries, tl.trans(key.to(DOT)), input_precision="ieee")
        if SOFTCAP > 0.0:
            score = SOFTCAP - 2.0 * SOFTCAP / (tl.exp2(score * scale) + 1.0)
        if MASKED:
            visible = token[None, :] <= position[:, None]
            if WINDOW > 0:
                visible = visible & (token[None, :] > (position - WINDOW)[:, None])
            score = tl.where(visible, score, float("-inf"))
        exponent_scale = 1.0 if SOFTCAP > 0.0 else scale
        new_max = tl.maximum(row_max, tl.max(score, 1) * exponent_scale)
        safe_max = new_max
        if MASKED:
            # Before the first visible key the maximum is -inf: subtracting 0 instead gives weights of zero, not NaN.
            safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2(score * exponent_scale - safe_max[:, None])
        rescale = tl.exp2(row_max - safe_max)
        row_sum = row_sum * rescale + tl.sum(weight, 1)
        acc = acc * rescale[:, None]
        if MASKED:
            in_range = token <= newest
            if WINDOW > 0:
                in_range = in_range & (token > oldest - WINDOW)
            value = tl.load(key_ptrs + VALUE_OFFSET, mask=in_range[:, None] & (lane < D)[None, :], other=0.0)
        elif WIDTH == D:
            value = tl.load(key_ptrs + VALUE_OFFSET)
        else:
            value = tl.load(key_ptrs + VALUE_OFFSET, mask=(lane < D)[None, :], other=0.0)
        acc = tl.dot(weight.to(DOT), value.to(DOT), acc, input_precision="ieee")
        row_max = new_max
    return acc, row_sum, row_max


def paged_prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    shape: AttentionShape,
    *,
    max_query_len: int,
    any_lengths: bool = False,
    kv_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
) -> torch.Tensor:
    """out[i, h] = Σ softmax(scale · q[i, h] · k[t]) · v[t] over the tokens t of its request, up to i's own, in its window.

    FlashAttention-2 (arXiv 2307.08691) over pages (arXiv 2309.06180), with the queries of all heads of a KV head in one tile
    (arXiv 2305.13245), so that keys and values are loaded once for them; soft-cap of arXiv 2408.00118.

    q: [T, H, D] fp16, bf16 or fp32, rows need not be contiguous; kv_cache: [N, P, 2, K, D] of q's dtype, or float8_e4m3fn with
    kv_scales [2] float32 (of keys, of values; None is 1), the chunks' own tokens already written; block_tables: [B, M] int32;
    query_starts: [B + 1] int32, rows query_starts[b] … query_starts[b + 1] - 1 are the newest tokens of request b, at most
    `max_query_len`; context_lens: [B] int32, the newest one's position plus one, so no fewer than the queries; 0 for a request
    of padding only where the decode kernel serves (below). Rows before query_starts[0] belong to no request and are not written
    to `out`; every other row belongs to one.

    Operations: 4 · D · H per pair of a query and a visible token, plus at most one tile's worth per tile. Bytes: keys and
    values once per tile of queries, mostly from L2. Only tiles on the diagonal and at the window's edge are masked; tiles
    without visible keys are not loaded. Scores, sums and outputs in float32; weights are rounded to the cache's dtype (float16
    for an fp8 cache) for the second product.

    Chunks of few queries do not fill a tile: the decode kernel splits their keys among programs, in the `workspace` of decodes
    if that has T rows. On Hopper the long chunks of most models are computed by `prefill_hopper`.

    If tiles and KV heads would leave multiprocessors idle, several programs share the keys of a tile, each with a split of at
    least 512 (`chunk_splits`); their partial results, at most 2^16 · (D + 1) · 4 bytes, are allocated here. The number of a
    tile's splits depends on its own keys and on the most splits of the step.

    `any_lengths`: the launch is captured, and any of the T rows and B requests may be unused. Then keys are split even where T
    rows would be enough tiles.

    The grid depends only on T, B and M. A query's result depends on its neighbours only through the tiling, which follows from
    `max_query_len`, and the most splits, which follow from it, T, B and the card; not on their lengths, nor on M.
    """
    check_attention(q, kv_cache, shape)
    num_requests = block_tables.shape[0]
    few_queries = next((queries for queries in SPLIT_QUERIES if max_query_len <= queries), 0)
    has_room = workspace is not None and workspace.partial_out.shape[0] >= q.shape[0]
    if few_queries and (has_room or _may_be_split(shape, kv_cache.dtype, q.shape[0], block_tables.shape[1], q.device)):
        return paged_decode(
            q, kv_cache, block_tables, context_lens, shape, query_starts=query_starts, max_query_len=few_queries,
            kv_scales=kv_scales, out=out, workspace=workspace if has_room else None,
        )  # fmt: skip
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_requests == 0:
        return out
    assert out.is_contiguous(), "out must be contiguous"
    kv_bytes, rows, windowed = kv_cache.element_size(), max_query_len * shape.group, shape.sliding_window is not None
    tiling = prefill_tiling(shape.head_dim, kv_bytes, rows, windowed, capability(q.device))
    assert shape.group <= tiling.rows, "a tile holds all heads of a group for at least one query"
    num_tiles = max_query_tiles(q.shape[0], num_requests, tiling.rows // shape.group)
    tile, programs = (tiling.rows, tiling.keys), multiprocessors(q.device) * tiling.programs
    splits = 1
    if not few_queries:
        splits = chunk_splits.max_tile_splits(
            shape, q.shape[0], num_requests, block_tables.shape[1], tile, programs, any_lengths=any_lengths
        )
    partials = DecodeWorkspace.empty(q.shape[0], splits, shape, q.device) if splits > 1 else None
    inputs = (q, kv_cache, block_tables, query_starts, context_lens)
    _launch_tiles(inputs, kv_scales, shape, tiling, num_tiles, out, partials)
    if partials is not None:
        chunk_splits.merge_chunks(partials, query_starts, context_lens, shape, tile, out)
    return out


def _launch_tiles(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    kv_scales: torch.Tensor | None,
    shape: AttentionShape,
    tiling: PrefillTiling,
    num_tiles: int,
    out: torch.Tensor,
    partials: DecodeWorkspace | None,
) -> None:
    """Launches `prefill_kernel`, or on Hopper the kernel that replaces it for most prompts."""
    q, kv_cache, block_tables, _, context_lens = inputs
    if has_gluon(q.device):
        from kernels.triton.attention import prefill_hopper as hopper

        if hopper.is_overlapped(shape, kv_cache.element_size(), tiling.rows, HOPPER):
            hopper.overlapped_prefill(*inputs, shape, num_tiles, out, partials)
            return
    partial_out, partial_lse = partials or (None, None)
    num_requests, splits = context_lens.shape[0], 1 if partials is None else partials.partial_out.shape[1]
    prefill_kernel[(num_tiles * shape.num_kv_heads, splits)](
        *inputs, kv_scales, out, partial_out, partial_lse,
        num_requests, num_tiles, score_factor(shape), q.stride(0), kv_cache.stride(0), block_tables.stride(0), splits,
        **prefill_constants(shape, tiling, is_split=partials is not None), REQUESTS=scheduled_requests(num_requests),
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip


def _may_be_split(shape: AttentionShape, kv_dtype: torch.dtype, num_rows: int, max_blocks: int, device: torch.device) -> bool:
    return workspace_bytes(shape, num_rows, max_blocks, kv_dtype, device) <= SPLIT_BYTES_MAX


def prefill_constants(shape: AttentionShape, tiling: PrefillTiling, *, is_split: bool = False) -> dict[str, object]:
    """Constants of `prefill_kernel`, except REQUESTS."""
    return {
        **shape_constants(shape),
        "ROWS": tiling.rows,
        "KEYS": tiling.keys,
        "SPLIT": chunk_splits.SPLIT_KEYS if is_split else 0,
    }
