"""Paged causal attention of prompt chunks: a tile of queries of all heads of one key head, with the keys before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.attention_rows import AttentionShape
from kernels.triton import chunk_splits
from kernels.triton.attention_decode import check_attention, paged_decode, score_factor
from kernels.triton.attention_splits import (
    SPLIT_QUERIES,
    TABLES,
    DecodeWorkspace,
    scheduled_requests,
    shape_constants,
    workspace_bytes,
)
from kernels.triton.chunk_splits import splits_of_tile
from kernels.triton.query_tiles import tile_keys, tile_owner, tile_queries, tile_rows
from kernels.triton.tuning import HOPPER, capability, card, has_gluon, multiprocessors, power_of_two

SPLIT_BYTES_MAX = 256 * 1024 * 1024
"""Memory that splitting the keys of short chunks may take beyond the workspace of decodes; many short chunks beside one very
long request are tiled instead."""


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """Tiles of `rows` queries, counting those of all heads of a key head, and `keys` keys at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    programs: int = 1  # per multiprocessor, at least


def prefill_tiling(head_dim: int, kv_bytes: int, rows: int, windowed: bool, capability: int) -> PrefillTiling:
    """rows: of the longest chunk. 128 rows share the keys and values they load, at a rate that the second-level cache of an
    H200 can deliver; two groups of four warps hold 64 of the rows each. Shorter chunks have smaller tiles. float32 has no
    matrix instructions: operands are in registers, for which only small tiles leave room."""
    if kv_bytes == 4:
        return PrefillTiling(min(max(16, power_of_two(rows)), 32), 16, 8, 2)
    width = power_of_two(head_dim)
    small = card(capability).is_small
    tile_rows = 16 if rows <= 16 else 64 if rows <= 64 or small else 128
    if width >= 256:  # the results of its queries fill the registers of four warps
        return PrefillTiling(min(tile_rows, 64), 32, 8, 2 if small else 3)
    keys = min(64, 4096 // width) if capability < 90 or small else 128 if tile_rows != 64 and not windowed else 64
    if tile_rows == 128:
        return PrefillTiling(tile_rows, keys, 8, 3)
    is_light = width * kv_bytes <= 128 if small else keys < 128
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
    attended,
    log_weights,
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
    """One tile of queries, for one key head; with SPLIT, which is 0 otherwise, one of its splits (`chunk_splits`)."""
    GROUP: tl.constexpr = H // K
    QUERIES: tl.constexpr = ROWS // GROUP
    kv_head, request, first_row, num_queries, first = tile_owner(query_starts, num_requests, num_tiles, K, QUERIES, REQUESTS)
    if first >= num_queries:
        return
    query, token_row, head, live, inside = tile_rows(kv_head, first_row, num_queries, first, GROUP, D, ROWS, WIDTH)
    queries = tile_queries(q, q_stride, token_row, head, inside, D, WIDTH, kv_cache.dtype.element_ty)
    lane = tl.arange(0, WIDTH)
    value_scale = 1.0
    if kv_scales is not None:
        scale *= tl.load(kv_scales)
        value_scale = tl.load(kv_scales + 1)
    # Positions of the queries; every key up to `oldest` is seen by all of them, none behind `newest` by any.
    start = tl.load(context_lens + request) - num_queries
    position = start + query
    begin, oldest, newest = tile_keys(start, first, num_queries, QUERIES, WINDOW, KEYS)
    end, whole = newest + 1, begin
    if WINDOW > 0:
        whole = tl.minimum((tl.maximum(newest + 1 - WINDOW, 0) + KEYS - 1) // KEYS * KEYS, newest + 1)
    if SPLIT > 0:
        split = tl.program_id(1)
        tiles, num_splits = splits_of_tile(begin, newest, max_splits, KEYS, SPLIT)
        if split >= num_splits:
            return
        begin += split * tiles * KEYS
        end = tl.minimum(begin + tiles * KEYS, end)
        whole = tl.minimum(tl.maximum(whole, begin), end) if WINDOW > 0 else begin
    diagonal = tl.maximum((oldest + 1) // KEYS * KEYS, whole)
    if SPLIT > 0:
        diagonal = tl.minimum(diagonal, end)
    keys = kv_cache + kv_head * D
    table = block_tables + request.to(tl.int64) * table_stride
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    if WINDOW > 0:
        found, total, largest = _attend(
            found, total, largest, queries, keys, table, begin, whole, position, oldest, newest, scale, block_stride,
            2 * K * D, K * D, D, P, WINDOW, SOFTCAP, KEYS, True,
        )  # fmt: skip
    found, total, largest = _attend(
        found, total, largest, queries, keys, table, whole, diagonal, position, oldest, newest, scale, block_stride,
        2 * K * D, K * D, D, P, WINDOW, SOFTCAP, KEYS, False,
    )  # fmt: skip
    found, total, largest = _attend(
        found, total, largest, queries, keys, table, diagonal, end, position, oldest, newest, scale, block_stride,
        2 * K * D, K * D, D, P, WINDOW, SOFTCAP, KEYS, True,
    )  # fmt: skip
    positive = tl.where(total > 0.0, total, 1.0)  # nothing was seen: zeros, whatever they are divided by
    found *= (value_scale / positive)[:, None]
    if SPLIT > 0:  # noqa: SIM102 - a constant, and what is behind it exists only then
        if num_splits > 1:
            place = (token_row * max_splits + split) * H + head
            tl.store(attended + (place * D)[:, None] + lane[None, :], found, mask=inside)
            tl.store(log_weights + place, largest + tl.log2(positive), mask=live)
            return
    place = (token_row * H + head) * D
    tl.store(out + place[:, None] + lane[None, :], found.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _attend(
    found,
    total,
    largest,
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
    """Adds the tiles that begin at `begin` and before `end`, a multiple of KEYS each, to what was found. Without MASKED every
    query sees every key of them."""
    WIDTH: tl.constexpr = queries.shape[1]
    DOT: tl.constexpr = queries.dtype
    column = tl.arange(0, KEYS)
    lane = tl.arange(0, WIDTH)
    # The blocks of a tile are asked for while the tile before is at work.
    block = tl.load(table + begin // P + column // P, mask=begin + column < end, other=0)
    for first in range(begin, end, KEYS):
        token = first + column
        if KEYS >= P:
            place = block.to(tl.int64) * block_stride + (column % P) * TOKEN_STRIDE
        else:
            place = block.to(tl.int64) * block_stride + (first % P + column) * TOKEN_STRIDE
        block = tl.load(table + (first + KEYS) // P + column // P, mask=token + KEYS < end, other=0)
        places = keys + place[:, None] + lane[None, :]
        key = tl.load(places) if WIDTH == D else tl.load(places, mask=(lane < D)[None, :], other=0.0)
        score = tl.dot(queries, tl.trans(key.to(DOT)), input_precision="ieee")
        if SOFTCAP > 0.0:
            score = SOFTCAP - 2.0 * SOFTCAP / (tl.exp2(score * scale) + 1.0)
        if MASKED:
            seen = token[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (token[None, :] > (position - WINDOW)[:, None])
            score = tl.where(seen, score, float("-inf"))
        factor = 1.0 if SOFTCAP > 0.0 else scale
        larger = tl.maximum(largest, tl.max(score, 1) * factor)
        base = larger
        if MASKED:
            # Nothing seen yet: any number in the place of -inf makes all weights zero instead of NaN.
            base = tl.where(larger == float("-inf"), 0.0, larger)
        weight = tl.exp2(score * factor - base[:, None])
        faded = tl.exp2(largest - base)
        total = total * faded + tl.sum(weight, 1)
        found = found * faded[:, None]
        if MASKED:
            held = token <= newest
            if WINDOW > 0:
                held = held & (token > oldest - WINDOW)
            value = tl.load(places + VALUE_OFFSET, mask=held[:, None] & (lane < D)[None, :], other=0.0)
        elif WIDTH == D:
            value = tl.load(places + VALUE_OFFSET)
        else:
            value = tl.load(places + VALUE_OFFSET, mask=(lane < D)[None, :], other=0.0)
        found = tl.dot(weight.to(DOT), value.to(DOT), found, input_precision="ieee")
        largest = larger
    return found, total, largest


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

    FlashAttention-2 (arXiv 2307.08691) over pages (arXiv 2309.06180), with the queries of all heads of a key head in one tile
    (arXiv 2305.13245), so that keys and values are loaded once for them; soft-cap of arXiv 2408.00118.

    q: [T, H, D] fp16, bf16 or fp32, rows need not be contiguous; kv_cache: [N, P, 2, K, D] of q's dtype, or float8_e4m3fn with
    kv_scales [2] float32 (of keys, of values; None is 1), the chunks' own tokens already written; block_tables: [B, M] int32;
    query_starts: [B + 1] int32, rows query_starts[b] … query_starts[b + 1] - 1 are the newest tokens of request b, at most
    `max_query_len`; context_lens: [B] int32, the newest one's position plus one. Rows before query_starts[0] belong to no
    request and are not written to `out`; every other row belongs to one.

    Operations: 4 · D · H per pair of a query and a token it sees, plus at most one tile's worth per tile. Bytes: keys and
    values once per tile of queries, mostly from the second-level cache. Only tiles on the diagonal and at the window's edge are
    masked; tiles that no query sees are not loaded. Scores, sums and outputs in float32; weights are rounded to the cache's
    dtype (float16 for an fp8 cache) for the second product.

    Chunks of few queries are not worth their own tile: the kernel of decodes splits their keys among programs, in the
    `workspace` of decodes if that has room for T rows. On Hopper the long chunks of most models are computed by
    `attention_prefill_hopper`.

    If tiles and key heads leave multiprocessors idle, several programs share the keys of a tile, each with a split of at least
    512 (`chunk_splits`); their results, at most 2^16 · (D + 1) · 4 bytes, are allocated here. The number of a tile's splits
    depends on its own keys and on the most splits that the step may have.

    `any_lengths`: the launch is captured, and any of the T rows and B requests may be unused; few rows' keys are split anyway.

    The grid depends only on T, B and M. A query's result depends on its neighbours only through the tiling, which follows from
    `max_query_len`, and the most splits, which follow from it, T, B and the card; not on their lengths, nor on M.
    """
    check_attention(q, kv_cache, shape)
    num_requests = block_tables.shape[0]
    few_queries = next((most for most in SPLIT_QUERIES if max_query_len <= most), 0)
    has_room = workspace is not None and workspace.attended.shape[0] >= q.shape[0]
    if few_queries and (has_room or _may_be_split(shape, kv_cache.dtype, q.shape[0], block_tables.shape[1], q.device)):
        return paged_decode(
            q, kv_cache, block_tables, context_lens, shape, query_starts=query_starts, max_query_len=few_queries,
            kv_scales=kv_scales, out=out, workspace=workspace if has_room else None,
        )  # fmt: skip
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_requests == 0:
        return out
    assert out.is_contiguous(), "outputs lie together"
    kv_bytes, rows, windowed = kv_cache.element_size(), max_query_len * shape.group, shape.sliding_window is not None
    tiling = prefill_tiling(shape.head_dim, kv_bytes, rows, windowed, capability(q.device))
    assert shape.group <= tiling.rows, "a tile holds the heads of at least one query"
    num_tiles = q.shape[0] // (tiling.rows // shape.group) + num_requests
    tile, programs = (tiling.rows, tiling.keys), multiprocessors(q.device) * tiling.programs
    splits = 1
    if not few_queries:
        splits = chunk_splits.chunk_splits(
            shape, q.shape[0], num_requests, block_tables.shape[1], tile, programs, any_lengths=any_lengths
        )
    parts = chunk_splits.chunk_parts(q.shape[0], splits, shape, q.device) if splits > 1 else None
    given = (q, kv_cache, block_tables, query_starts, context_lens)
    overlapped = _overlapped(shape, kv_bytes, tiling, q.device)
    if overlapped is not None:
        overlapped(*given, shape, num_tiles, out, parts)
    else:
        _launch_tiles(given, kv_scales, shape, tiling, num_tiles, out, parts)
    if parts is not None:
        chunk_splits.merge_chunks(parts, query_starts, context_lens, shape, tile, out)
    return out


def _overlapped(
    shape: AttentionShape, kv_bytes: int, tiling: PrefillTiling, device: torch.device
) -> Callable[..., torch.Tensor] | None:
    """The kernel that replaces `prefill_kernel` for these tiles, if there is one."""
    if not has_gluon(device):
        return None
    from kernels.triton import attention_prefill_hopper as hopper

    return hopper.overlapped_prefill if hopper.is_overlapped(shape, kv_bytes, tiling.rows, HOPPER) else None


def _launch_tiles(
    given: tuple[torch.Tensor, ...],
    kv_scales: torch.Tensor | None,
    shape: AttentionShape,
    tiling: PrefillTiling,
    num_tiles: int,
    out: torch.Tensor,
    parts: DecodeWorkspace | None,
) -> None:
    q, kv_cache, block_tables, _, context_lens = given
    attended, log_weights = parts or (None, None)
    num_requests, splits = context_lens.shape[0], 1 if parts is None else parts.attended.shape[1]
    prefill_kernel[(num_tiles * shape.num_kv_heads, splits)](
        *given, kv_scales, out, attended, log_weights,
        num_requests, num_tiles, score_factor(shape), q.stride(0), kv_cache.stride(0), block_tables.stride(0), splits,
        **prefill_constants(shape, tiling, is_split=parts is not None), REQUESTS=scheduled_requests(num_requests),
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
