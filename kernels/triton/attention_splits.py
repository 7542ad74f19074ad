"""How the keys of decodes are cut into splits, which program works on which, and how their results are merged.

The number and size of a request's splits follow from its own length, so no request's result depends on the others. Which
program computes which split follows from all lengths, so that programs share the work evenly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.attention_rows import AttentionShape
from kernels.triton.early_launch import wait_for_previous
from kernels.triton.tuning import LOG2_E, REGISTERS_MULTIPROCESSOR, SHARED_BYTES_RESERVED, capability, card, power_of_two

MERGE_CHUNK, MERGE_WARPS = 16, 2
"""Splits added up at a time. Merging mostly waits for memory, so it should have many small programs."""
TABLES = ["block_tables", "context_lens", "query_starts"]
"""Parts of one tensor; each begins where the one before ends. They are read word by word, so a kernel variant for those aligned
to 16 bytes gains nothing, and a variant for each alignment takes seconds to compile if first met while serving."""
MERGE_CONSTANTS = ("H", "D", "QUERIES", "WINDOW", "WIDTH", "TILE", "SPLIT")
SPLIT_QUERIES = (4, 8)
"""Queries attended together over the splits of their request: the numbers, besides one, for which the kernel is made. Smaller
numbers take no less room in a tile of 16 rows."""
COLUMNS_MAX = 8
"""Up to this many queries of one key head are the columns of products over an fp8 cache, and its tokens the rows: as rows the
queries would be at least 16, with twice the instructions."""


class DecodeWorkspace(NamedTuple):
    """Memory for the results of splits: T rows of queries, S splits. One workspace serves all layers and batch sizes."""

    attended: torch.Tensor  # [T, S, H, D] float32: values averaged over the split
    log_weights: torch.Tensor  # [T, S, H] float32: base-2 logarithm of the sum of weights, -inf where nothing was seen


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """A split has at least `split` tokens; `tile` tokens are loaded at a time."""

    tile: int
    split: int
    num_warps: int
    num_stages: int
    programs: int  # per multiprocessor
    registers_max: int | None = None  # per thread; None leaves the number to the assembler

    @property
    def rotated(self) -> DecodeTiling:
        """The same for programs that rotate what they attend. If the assembler chooses, a thread takes 254 registers; with the
        number for four programs it spills."""
        programs = min(3, self.programs)
        return replace(self, programs=programs, registers_max=registers_for(programs, self.num_warps))


def decode_tiling(head_dim: int, kv_bytes: int, rows: int, capability: int, queries: int = 1) -> DecodeTiling:
    """rows: queries of one key head, before they are rounded up to a tile.

    Two tiles of 16 KiB of keys and two of values are being loaded while one is computed, in each program of a multiprocessor:
    4.3 TB/s at 0.8 µs of latency require 26 KiB for each of an H200's 132. Few queries over an fp8 cache have one program more,
    with tiles of 8 KiB: 158 µs for 256 requests of 1k of Llama-8B, 171 with the usual tiles. A split is 64 KiB to 512 KiB of
    keys and values: two tiles of 16 KiB of keys for a short request, so that a lone one keeps many programs busy, sixteen for a
    long one, whose partial results would otherwise be a large share of the bytes read. float32 has no matrix instructions: its
    operands are in registers, for which eight warps and short tiles leave room."""
    row_bytes, is_float32 = power_of_two(head_dim) * kv_bytes, kv_bytes == 4
    small = card(capability).is_small
    is_columns = kv_bytes == 1 and rows <= COLUMNS_MAX
    tile = max(16 if is_float32 else 32, min(128, (8192 if small or is_columns else 16384) // row_bytes))
    programs = 2 if capability < 90 or small else 4 if is_columns else 3
    is_wide = rows > 16 or is_float32
    num_warps = 8 if is_wide else 4
    if is_wide:  # with many rows over fp8 a thread takes 250 registers, and 64 rows half the shared memory
        programs = 1 if kv_bytes == 1 or rows > 32 else programs - 1
    if kv_bytes == 1 and rows > 16 and _is_crowded(head_dim, rows, small):
        tile //= 2
        if head_dim <= 64 and rows <= 32:  # two programs of half the warps load as much at a time as one
            programs, num_warps = 2, 4
    held = card(capability).shared_bytes_multiprocessor // (4 * tile * row_bytes + SHARED_BYTES_RESERVED)
    programs = min(programs, held)  # two tiles of keys and two of values being loaded: 64 KiB for heads of 256 in 16 bits
    return DecodeTiling(
        tile=tile,
        split=max(64, 32768 // row_bytes),
        num_warps=num_warps,
        num_stages=3,
        programs=programs,
        registers_max=registers_for(programs, num_warps) if kv_bytes == 1 or head_dim > 128 or queries > 1 else None,
    )


def _is_crowded(head_dim: int, rows: int, small: bool) -> bool:
    """Whether a whole tile of keys over an fp8 cache leaves a thread too few registers, as counted by the compile gate. On a
    small card the tiles of large heads are short already. A group that is not a power of two takes registers to compute a row's
    query and head."""
    if head_dim <= 64:
        return rows <= 32 or small
    return head_dim <= 128 and not small and (rows > 64 or 32 < rows < power_of_two(rows))


def registers_for(programs: int, num_warps: int) -> int:
    """Most registers per thread with which a multiprocessor holds `programs` programs. The assembler has a target of its own:
    188, where 170 are available for three programs over an fp8 cache, so a third of the grid would wait for the others."""
    return min(255, REGISTERS_MULTIPROCESSOR // (32 * num_warps * programs) // 8 * 8)


def max_splits(num_tokens: int, split: int) -> int:
    """The most splits of a request of at most `num_tokens`, on any card: the largest result of `splits_of`."""
    few, some, many, most = (-(-num_tokens // (times * split)) for times in (1, 2, 4, 8))
    return max(1, min(4, few), min(8, some) if few > 4 else 1, min(32, many) if few > 16 else 1, most if few > 128 else 1)


def decode_workspace(
    shape: AttentionShape, max_rows: int, max_blocks: int, kv_dtype: torch.dtype, device: torch.device
) -> DecodeWorkspace:
    """Memory for `max_rows` queries of any requests of up to `max_blocks` blocks. Llama-3.1-8B, 256 queries over 32k tokens:
    129 MiB."""
    size = _workspace_size(shape, max_rows, max_blocks, kv_dtype, device)
    return DecodeWorkspace(
        torch.empty(*size, shape.head_dim, dtype=torch.float32, device=device),
        torch.empty(size, dtype=torch.float32, device=device),
    )


def workspace_bytes(shape: AttentionShape, max_rows: int, max_blocks: int, kv_dtype: torch.dtype, device: torch.device) -> int:
    """Bytes that `decode_workspace` allocates for these arguments."""
    size = _workspace_size(shape, max_rows, max_blocks, kv_dtype, device)
    return math.prod(size) * (shape.head_dim + 1) * torch.float32.itemsize


def _workspace_size(
    shape: AttentionShape, max_rows: int, max_blocks: int, kv_dtype: torch.dtype, device: torch.device
) -> tuple[int, int, int]:
    return max_rows, shape_splits(shape, max_blocks, shape_tiling(shape, kv_dtype, 1, device)), shape.num_heads


def shape_splits(shape: AttentionShape, max_blocks: int, tiling: DecodeTiling) -> int:
    """The most splits of a request of `max_blocks` blocks. With a window, the newest queries (as many as are attended together)
    see the window, a few tokens more and a part of a tile: less than a split beyond the window."""
    num_tokens = max_blocks * shape.block_size
    if shape.sliding_window is not None:
        num_tokens = min(num_tokens, shape.sliding_window + tiling.split)
    return max_splits(num_tokens, tiling.split)


def max_verify_group(shape: AttentionShape, kv_dtype: torch.dtype, device: torch.device) -> int:
    """The most consecutive queries of a request to attend as one group, if each could be a decode of its own: as many as leave
    room for two programs on a multiprocessor, one of which computes while the other waits; never fewer than the smallest group,
    as each tile of queries reads all of their context."""
    few, *more = SPLIT_QUERIES
    return max((most for most in more if shape_tiling(shape, kv_dtype, most, device).programs > 1), default=few)


def shape_tiling(shape: AttentionShape, kv_dtype: torch.dtype, max_query_len: int, device: torch.device) -> DecodeTiling:
    rows = query_rows(shape, max_query_len)
    return decode_tiling(shape.head_dim, kv_dtype.itemsize, rows, capability(device), max_query_len)


def scheduled_requests(num_requests: int) -> int:
    """The number of requests that kernels search among: one variant for few, one for the most that are served."""
    return 32 if num_requests <= 32 else max(256, power_of_two(num_requests))


def query_rows(shape: AttentionShape, max_query_len: int) -> int:
    """Queries of one key head that are attended together."""
    return max_query_len * shape.group


def tile_rows(shape: AttentionShape, max_query_len: int, kv_bytes: int) -> int:
    """Rows of a tile for these queries; matrix instructions need at least 16 rows, or 8 columns."""
    rows = query_rows(shape, max_query_len)
    return COLUMNS_MAX if kv_bytes == 1 and rows <= COLUMNS_MAX else max(16, power_of_two(rows))


def shape_constants(shape: AttentionShape) -> dict[str, Any]:
    """Constants that follow from the shape alone, under the names that all kernels of paged attention use."""
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
    """Constants of `attention_decode.split_kernel`, except REQUESTS; those of MERGE_CONSTANTS are also `merge_kernel`'s."""
    return {
        **shape_constants(shape),
        "QUERIES": max_query_len,
        "ROWS": tile_rows(shape, max_query_len, kv_bytes),
        "TILE": tiling.tile,
        "SPLIT": tiling.split,
    }


@triton.jit
def splits_of(
    context_len, card_groups, WINDOW: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    """First token, tiles of a split and number of splits of a request: all from its own length, nothing from the batch.
    card_groups: of programs that the card holds. A long request with as many splits has a multiple of them, so that alone it
    loads all alike."""
    first = context_len * 0
    if WINDOW > 0:
        first = tl.maximum(context_len - (WINDOW + QUERIES - 1), 0) // TILE * TILE
    num_tokens = context_len - first
    few, some = tl.cdiv(num_tokens, SPLIT), tl.cdiv(num_tokens, 2 * SPLIT)
    many = tl.where(few <= 128, tl.cdiv(num_tokens, 4 * SPLIT), tl.cdiv(num_tokens, 8 * SPLIT))
    many = tl.where(many >= card_groups, many // card_groups * card_groups, many)
    num_splits = tl.maximum(tl.where(few <= 4, few, tl.where(few <= 16, some, many)), 1)
    # Evenly, so that no split is a remainder of a few tokens.
    tiles = tl.maximum((num_tokens + num_splits * TILE - 1) // (num_splits * TILE), 1)
    return first, tiles, tl.maximum((num_tokens + tiles * TILE - 1) // (tiles * TILE), 1)


@triton.jit
def schedule(
    context_lens,
    query_starts,
    num_requests,
    group,
    num_groups,
    card_groups,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """The group's share of all splits, by cost: first request, its first split, and how many splits from there on. Requests
    without a query have none; they are the last."""
    request = tl.arange(0, REQUESTS)
    there = request < num_requests
    context_len = tl.load(context_lens + request, mask=there, other=0)
    if query_starts is not None:
        first_query = tl.load(query_starts + request, mask=there, other=0)
        there = tl.load(query_starts + request + 1, mask=there, other=0) > first_query
    _, tiles, num_splits = splits_of(context_len, card_groups, WINDOW, QUERIES, TILE, SPLIT)
    cost = tiles + 1  # a split begins and ends with the work of about one tile
    num_splits = tl.where(there, num_splits, 0)
    end = tl.cumsum(num_splits * cost, 0)
    start = end - num_splits * cost
    # ⌊total · group / num_groups⌋ and the next, without a product that is too large for 32 bits.
    total = tl.max(end, 0)
    share, rest = total // num_groups, total % num_groups
    low = share * group + rest * group // num_groups
    high = share * (group + 1) + rest * (group + 1) // num_groups
    # A split belongs to the group in whose share it begins.
    before = tl.minimum(tl.maximum((low - start + cost - 1) // cost, 0), num_splits)
    until = tl.minimum(tl.maximum((high - start + cost - 1) // cost, 0), num_splits)
    first_request = tl.min(tl.where(until > before, request, num_requests), 0)
    first_split = tl.sum(tl.where(request == first_request, before, 0), 0)
    return first_request, first_split, tl.sum(until - before, 0)


@triton.jit(do_not_specialize=["num_requests", "max_splits", "card_groups"], do_not_specialize_on_alignment=TABLES[1:])
def merge_kernel(
    context_lens,
    query_starts,
    out,
    attended,
    log_weights,
    num_requests,
    max_splits,
    card_groups,
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
    """One query and head: the average of its splits by weight, always added up in the same order."""
    wait_for_previous(EARLY)
    token_row, head = tl.program_id(0), tl.program_id(1)
    request = token_row
    if query_starts is not None:
        index = tl.arange(0, REQUESTS)
        end = tl.load(query_starts + index + 1, mask=index < num_requests, other=token_row + 1)
        request = tl.sum((end <= token_row).to(tl.int32), 0)
    _, _, num_splits = splits_of(tl.load(context_lens + request), card_groups, WINDOW, QUERIES, TILE, SPLIT)
    if num_splits > 1:
        merge_row(out, attended, log_weights, token_row, head, num_splits, max_splits, H, D, WIDTH, CHUNK)


@triton.jit
def merge_row(
    out,
    attended,
    log_weights,
    token_row,
    head,
    num_splits,
    max_splits,
    H: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Puts together what the splits of one query and head found, CHUNK of them at a time and in their order."""
    lane = tl.arange(0, WIDTH)
    largest = float("-inf")
    total = 0.0
    found = tl.zeros([WIDTH], tl.float32)
    for start in range(0, num_splits, CHUNK):
        split = start + tl.arange(0, CHUNK)
        there = split < num_splits
        place = (token_row.to(tl.int64) * max_splits + split) * H + head
        log_weight = tl.load(log_weights + place, mask=there, other=float("-inf"))
        inside = there[:, None] & (lane < D)[None, :]
        part = tl.load(attended + (place * D)[:, None] + lane[None, :], mask=inside, other=0.0)
        larger = tl.maximum(largest, tl.max(log_weight, 0))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weight, faded = tl.exp2(log_weight - base), tl.exp2(largest - base)
        total = total * faded + tl.sum(weight, 0)
        found = found * faded + tl.sum(part * weight[:, None], 0)
        largest = larger
    found = found / tl.where(total > 0.0, total, 1.0)
    place = (token_row.to(tl.int64) * H + head) * D
    tl.store(out + place + lane, found.to(out.dtype.element_ty), mask=lane < D)
