"""Split-KV planning for decodes: how keys are divided into splits, which program computes which, and the merge of the results.

The number and size of a request's splits depend only on its own length, so its result does not depend on other requests. Which
program computes which split depends on all lengths, so that the work is balanced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.attention_rows import AttentionShape
from kernels.triton.launching.card_properties import (
    LOG2_E,
    REGISTERS_MULTIPROCESSOR,
    SHARED_BYTES_RESERVED,
    capability,
    card,
    power_of_two,
)
from kernels.triton.launching.early_launch import wait_for_previous

MERGE_CHUNK, MERGE_WARPS = 16, 2
"""Splits merged at a time. The merge is bound by memory latency, so many small programs are best."""
TABLES = ["block_tables", "context_lens", "query_starts"]
"""Consecutive slices of one tensor, so their alignment varies. They are read word by word: a kernel variant for 16-byte
alignment gains nothing, and a variant for each alignment takes seconds to compile if it is first needed while serving."""
MERGE_CONSTANTS = ("H", "D", "QUERIES", "WINDOW", "WIDTH", "TILE", "SPLIT")
SPLIT_QUERIES = (4, 8)
"""Numbers of queries per request, besides one, that the kernel is compiled for. A smaller number would take a whole tile
of 16 rows too."""
COLUMNS_MAX = 8
"""With an fp8 cache, up to this many queries of one KV head are the columns of the matrix products, and tokens the rows: as
rows the queries would be padded to at least 16, with twice the instructions."""


class DecodeWorkspace(NamedTuple):
    """Memory for partial results: T query rows, S splits. One workspace serves all layers and batch sizes."""

    partial_out: torch.Tensor  # [T, S, H, D] float32: outputs of each split, normalised within it
    partial_lse: torch.Tensor  # [T, S, H] float32: base-2 log-sum-exp of the scores, -inf without visible keys

    @classmethod
    def empty(cls, num_rows: int, splits: int, shape: AttentionShape, device: torch.device) -> DecodeWorkspace:
        """Uninitialised memory for `splits` splits of `num_rows` query rows."""
        size = num_rows, splits, shape.num_heads
        return cls(
            torch.empty(*size, shape.head_dim, dtype=torch.float32, device=device),
            torch.empty(size, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """Launch parameters: `split` tokens are a split of a short request, those of long requests are larger; `tile` tokens are
    loaded at a time."""

    tile: int
    split: int
    num_warps: int
    num_stages: int
    programs: int  # per multiprocessor
    registers_max: int | None = None  # per thread; None leaves the number to the assembler

    @property
    def rotated(self) -> DecodeTiling:
        """The same for programs that also rotate. If the assembler chooses, a thread takes 254 registers; with the limit for
        four programs it spills."""
        programs = min(3, self.programs)
        return replace(self, programs=programs, registers_max=registers_for(programs, self.num_warps))


def decode_tiling(head_dim: int, kv_bytes: int, rows: int, capability: int, queries: int = 1) -> DecodeTiling:
    """rows: queries of one KV head, before padding to a tile.

    In each program, two tiles of 16 KiB of keys and two of values are in flight while one is computed: 4.3 TB/s at 0.8 µs of
    latency require 26 KiB for each of an H200's 132 multiprocessors. For few queries over an fp8 cache, there is one program
    more per multiprocessor, with tiles of 8 KiB: 158 µs for 256 requests of 1k of Llama-8B, 171 with the usual tiles. A split
    is 64 KiB to 512 KiB of keys and values: two tiles of 16 KiB of keys for a short request, so that a single one occupies many
    programs; sixteen for a long one, whose partial results would otherwise be a large share of the bytes read. float32 has no
    matrix instructions: its operands are in registers, which suffice only with eight warps and short tiles."""
    row_bytes, is_float32 = power_of_two(head_dim) * kv_bytes, kv_bytes == 4
    is_small = card(capability).is_small
    queries_are_columns = kv_bytes == 1 and rows <= COLUMNS_MAX
    tile = max(16 if is_float32 else 32, min(128, (8192 if is_small or queries_are_columns else 16384) // row_bytes))
    programs = 2 if capability < 90 or is_small else 4 if queries_are_columns else 3
    is_wide = rows > 16 or is_float32
    num_warps = 8 if is_wide else 4
    if is_wide:  # many rows over fp8 take 250 registers per thread, and 64 rows half the shared memory
        programs = 1 if kv_bytes == 1 or rows > 32 else programs - 1
    if kv_bytes == 1 and rows > 16 and _exceeds_registers(head_dim, rows, is_small):
        tile //= 2
        if head_dim <= 64 and rows <= 32:  # two programs of half the warps have as many loads in flight as one
            programs, num_warps = 2, 4
    resident_max = card(capability).shared_bytes_multiprocessor // (4 * tile * row_bytes + SHARED_BYTES_RESERVED)
    programs = min(programs, resident_max)  # two tiles of keys and two of values in flight: 64 KiB for heads of 256 in 16 bits
    return DecodeTiling(
        tile=tile,
        split=max(64, 32768 // row_bytes),
        num_warps=num_warps,
        num_stages=3,
        programs=programs,
        registers_max=registers_for(programs, num_warps) if kv_bytes == 1 or head_dim > 128 or queries > 1 else None,
    )


def _exceeds_registers(head_dim: int, rows: int, is_small: bool) -> bool:
    """Whether a full tile over an fp8 cache needs more registers than a thread has, as measured by the compile gate. On a small
    card, tiles of large heads are already short. For a group that is not a power of two, the computation of a row's query and
    head takes registers."""
    if head_dim <= 64:
        return rows <= 32 or is_small
    return head_dim <= 128 and not is_small and (rows > 64 or 32 < rows < power_of_two(rows))


def registers_for(programs: int, num_warps: int) -> int:
    """The most registers per thread with which `programs` programs fit on a multiprocessor. Left to itself, the assembler takes
    188 over an fp8 cache, where three programs leave 170 to each thread, so a third of the grid would wait for the rest."""
    return min(255, REGISTERS_MULTIPROCESSOR // (32 * num_warps * programs) // 8 * 8)


def max_splits(num_tokens: int, split: int) -> int:
    """The most splits of a request of at most `num_tokens`, on any card: the largest result of `plan_splits`."""
    x1, x2, x4, x8 = (-(-num_tokens // (factor * split)) for factor in (1, 2, 4, 8))
    return max(1, min(4, x1), min(8, x2) if x1 > 4 else 1, min(32, x4) if x1 > 16 else 1, x8 if x1 > 128 else 1)


def decode_workspace(
    shape: AttentionShape, max_rows: int, max_blocks: int, kv_dtype: torch.dtype, device: torch.device
) -> DecodeWorkspace:
    """Memory for `max_rows` queries of requests of up to `max_blocks` blocks. Llama-3.1-8B, 256 queries over 32k tokens: 129
    MiB."""
    return DecodeWorkspace.empty(max_rows, _workspace_splits(shape, max_blocks, kv_dtype, device), shape, device)


def workspace_bytes(shape: AttentionShape, max_rows: int, max_blocks: int, kv_dtype: torch.dtype, device: torch.device) -> int:
    """Bytes that `decode_workspace` allocates for these arguments."""
    splits = _workspace_splits(shape, max_blocks, kv_dtype, device)
    return max_rows * splits * shape.num_heads * (shape.head_dim + 1) * torch.float32.itemsize


def _workspace_splits(shape: AttentionShape, max_blocks: int, kv_dtype: torch.dtype, device: torch.device) -> int:
    return shape_splits(shape, max_blocks, shape_tiling(shape, kv_dtype, 1, device))


def shape_splits(shape: AttentionShape, max_blocks: int, tiling: DecodeTiling) -> int:
    """The most splits of a request of `max_blocks` blocks. With a window, the newest queries of a group attend to the window, a
    few tokens more and part of a tile: less than one split beyond the window."""
    num_tokens = max_blocks * shape.block_size
    if shape.sliding_window is not None:
        num_tokens = min(num_tokens, shape.sliding_window + tiling.split)
    return max_splits(num_tokens, tiling.split)


def max_verify_group(shape: AttentionShape, kv_dtype: torch.dtype, device: torch.device) -> int:
    """The most consecutive queries of a request to process as one group, where each could be a decode of its own: as many as
    allow two programs per multiprocessor, one of which computes while the other waits for memory; at least the smallest group,
    as each tile of queries reads their whole context."""
    smallest, *larger = SPLIT_QUERIES
    return max((queries for queries in larger if shape_tiling(shape, kv_dtype, queries, device).programs > 1), default=smallest)


def shape_tiling(shape: AttentionShape, kv_dtype: torch.dtype, max_query_len: int, device: torch.device) -> DecodeTiling:
    rows = query_rows(shape, max_query_len)
    return decode_tiling(shape.head_dim, kv_dtype.itemsize, rows, capability(device), max_query_len)


def scheduled_requests(num_requests: int) -> int:
    """The padded number of requests that kernels search: one variant for up to 32, one for up to 256, then powers of two."""
    return 32 if num_requests <= 32 else max(256, power_of_two(num_requests))


def query_rows(shape: AttentionShape, max_query_len: int) -> int:
    """Queries of one KV head in one group."""
    return max_query_len * shape.group


def padded_rows(shape: AttentionShape, max_query_len: int, kv_bytes: int) -> int:
    """Rows of a tile for these queries: matrix instructions need at least 16 rows, or 8 columns."""
    rows = query_rows(shape, max_query_len)
    return COLUMNS_MAX if kv_bytes == 1 and rows <= COLUMNS_MAX else max(16, power_of_two(rows))


def shape_constants(shape: AttentionShape) -> dict[str, Any]:
    """Constants that depend on the shape alone, by the names they have in all kernels of paged attention."""
    return {
        "H": shape.num_heads,
        "K": shape.num_kv_heads,
        "D": shape.head_dim,
        "P": shape.block_size,
        "WINDOW": shape.sliding_window or 0,
        "SOFTCAP": (shape.softcap or 0.0) * LOG2_E,
        "WIDTH": power_of_two(shape.head_dim),
    }


def split_constants(shape: AttentionShape, max_query_len: int, kv_bytes: int, tiling: DecodeTiling) -> dict[str, Any]:
    """Constants of `decode.split_kernel`, except REQUESTS; those of MERGE_CONSTANTS are also `merge_kernel`'s."""
    return {
        **shape_constants(shape),
        "QUERIES": max_query_len,
        "ROWS": padded_rows(shape, max_query_len, kv_bytes),
        "TILE": tiling.tile,
        "SPLIT": tiling.split,
    }


@triton.jit
def plan_splits(
    context_len, resident_groups, WINDOW: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    """→ first token, tiles per split and number of splits of a request, independent of the rest of the batch.

    resident_groups: groups of programs that the card holds at a time. If a long request has at least as many splits, their
    number is rounded down to a multiple, so that a single request balances over the card."""
    first_token = context_len * 0
    if WINDOW > 0:
        first_token = tl.maximum(context_len - (WINDOW + QUERIES - 1), 0) // TILE * TILE
    num_tokens = context_len - first_token
    splits_x1, splits_x2 = tl.cdiv(num_tokens, SPLIT), tl.cdiv(num_tokens, 2 * SPLIT)
    long_splits = tl.where(splits_x1 <= 128, tl.cdiv(num_tokens, 4 * SPLIT), tl.cdiv(num_tokens, 8 * SPLIT))
    long_splits = tl.where(long_splits >= resident_groups, long_splits // resident_groups * resident_groups, long_splits)
    num_splits = tl.maximum(tl.where(splits_x1 <= 4, splits_x1, tl.where(splits_x1 <= 16, splits_x2, long_splits)), 1)
    # Splits have equal numbers of tiles; only the last may be shorter.
    tiles = tl.maximum((num_tokens + num_splits * TILE - 1) // (num_splits * TILE), 1)
    return first_token, tiles, tl.maximum((num_tokens + tiles * TILE - 1) // (tiles * TILE), 1)


@triton.jit
def schedule(
    context_lens,
    query_starts,
    num_requests,
    group,
    num_groups,
    resident_groups,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """→ the splits of a group of programs, of about equal cost for all groups: first request, its first split, and the number
    of splits from there on. Requests without queries have no splits; they come last."""
    request = tl.arange(0, REQUESTS)
    has_queries = request < num_requests
    context_len = tl.load(context_lens + request, mask=has_queries, other=0)
    if query_starts is not None:
        first_query = tl.load(query_starts + request, mask=has_queries, other=0)
        has_queries = tl.load(query_starts + request + 1, mask=has_queries, other=0) > first_query
    _, tiles, num_splits = plan_splits(context_len, resident_groups, WINDOW, QUERIES, TILE, SPLIT)
    cost = tiles + 1  # prologue and epilogue of a split cost about as much as one tile
    num_splits = tl.where(has_queries, num_splits, 0)
    end = tl.cumsum(num_splits * cost, 0)
    start = end - num_splits * cost
    # ⌊total · group / num_groups⌋, and the same for group + 1, without a product that overflows 32 bits.
    total = tl.max(end, 0)
    quotient, remainder = total // num_groups, total % num_groups
    cost_begin = quotient * group + remainder * group // num_groups
    cost_end = quotient * (group + 1) + remainder * (group + 1) // num_groups
    # A split belongs to the group in whose cost range it begins.
    split_begin = tl.minimum(tl.maximum((cost_begin - start + cost - 1) // cost, 0), num_splits)
    split_end = tl.minimum(tl.maximum((cost_end - start + cost - 1) // cost, 0), num_splits)
    first_request = tl.min(tl.where(split_end > split_begin, request, num_requests), 0)
    first_split = tl.sum(tl.where(request == first_request, split_begin, 0), 0)
    return first_request, first_split, tl.sum(split_end - split_begin, 0)


@triton.jit(do_not_specialize=["num_requests", "max_splits", "resident_groups"], do_not_specialize_on_alignment=TABLES[1:])
def merge_kernel(
    context_lens,
    query_starts,
    out,
    partial_out,
    partial_lse,
    num_requests,
    max_splits,
    resident_groups,
    H: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    REQUESTS: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merges the splits of one query and head, always in the same order. A single split has already been written to `out`."""
    wait_for_previous(EARLY)
    token_row, head = tl.program_id(0), tl.program_id(1)
    request = token_row
    if query_starts is not None:
        index = tl.arange(0, REQUESTS)
        end = tl.load(query_starts + index + 1, mask=index < num_requests, other=token_row + 1)
        request = tl.sum((end <= token_row).to(tl.int32), 0)
    _, _, num_splits = plan_splits(tl.load(context_lens + request), resident_groups, WINDOW, QUERIES, TILE, SPLIT)
    if num_splits > 1:
        merge_row(out, partial_out, partial_lse, token_row, head, num_splits, max_splits, H, D, WIDTH, CHUNK)


@triton.jit
def merge_row(
    out,
    partial_out,
    partial_lse,
    token_row,
    head,
    num_splits,
    max_splits,
    H: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Merges the partial results of one query and head by their log-sum-exp, CHUNK splits at a time and in order."""
    lane = tl.arange(0, WIDTH)
    max_lse = float("-inf")
    weight_sum = 0.0
    acc = tl.zeros([WIDTH], tl.float32)
    for start in range(0, num_splits, CHUNK):
        split = start + tl.arange(0, CHUNK)
        split_mask = split < num_splits
        offset = (token_row.to(tl.int64) * max_splits + split) * H + head
        lse = tl.load(partial_lse + offset, mask=split_mask, other=float("-inf"))
        partial_mask = split_mask[:, None] & (lane < D)[None, :]
        partial = tl.load(partial_out + (offset * D)[:, None] + lane[None, :], mask=partial_mask, other=0.0)
        new_max = tl.maximum(max_lse, tl.max(lse, 0))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight, rescale = tl.exp2(lse - safe_max), tl.exp2(max_lse - safe_max)
        weight_sum = weight_sum * rescale + tl.sum(weight, 0)
        acc = acc * rescale + tl.sum(partial * weight[:, None], 0)
        max_lse = new_max
    acc = acc / tl.where(weight_sum > 0.0, weight_sum, 1.0)
    offset = (token_row.to(tl.int64) * H + head) * D
    tl.store(out + offset + lane, acc.to(out.dtype.element_ty), mask=lane < D)
