"""How the keys of decodes are cut into splits, which program works on which, and how splits are put together again.

The number and size of a request's splits follow from its own length, so that no request's result depends on the others; which
program does which split follows from all lengths, so that programs share the work alike.
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
"""Splits that are added up at a time. Merging waits for memory and little else, so many small programs should be at it."""
TABLES = ["block_tables", "context_lens", "query_starts"]
"""Pieces of one tensor, which begin wherever the piece before them ends. They are read word by word, so that nothing is gained
by a variant of a kernel for those on 16 bytes; one for each way of lying takes seconds when it is met while serving."""
MERGE_CONSTANTS = ("H", "D", "QUERIES", "WINDOW", "WIDTH", "TILE", "SPLIT")
SPLIT_QUERIES = (4, 8)
"""Queries that are attended together over the splits of their request: numbers that the kernel is made for, besides one. Fewer
take no more room in a tile of 16 rows."""
COLUMNS_MAX = 8
"""Queries of one key head that are columns of products over an fp8 cache, and its tokens their rows: as rows they would be
16 at least, twice the instructions."""


class DecodeWorkspace(NamedTuple):
    """Where splits leave what they found: T rows of queries, S splits. One serves all layers and batch sizes."""

    attended: torch.Tensor  # [T, S, H, D] float32: values averaged over the split
    log_weights: torch.Tensor  # [T, S, H] float32: base-2 logarithm of the sum of weights, -inf where nothing was seen


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """`split` tokens at least in a split; `tile` tokens are loaded at a time."""

    tile: int
    split: int
    num_warps: int
    num_stages: int
    programs: int  # of one multiprocessor
    registers_max: int | None = None  # of a thread; None leaves their number to the assembler

    @property
    def rotated(self) -> DecodeTiling:
        """The same for programs that rotate what they attend. Left to the assembler a thread takes 254 registers; with those
        of four programs it spills."""
        programs = min(3, self.programs)
        return replace(self, programs=programs, registers_max=registers_for(programs, self.num_warps))


def decode_tiling(head_dim: int, kv_bytes: int, rows: int, capability: int, queries: int = 1) -> DecodeTiling:
    """rows: of queries of one key head, before they are rounded to a tile.

    Two tiles of 16 KiB of keys and as much of values are on their way while one is at work, in each of the programs of a
    multiprocessor: 4.3 TB/s at 0.8 µs of latency want 26 KiB of each of an H200's 132. Few queries over an fp8 cache have one
    program more, of tiles of 8 KiB: 158 µs for 256 requests of 1k of Llama-8B, 171 as the others. A split is 64 KiB to 512 KiB
    of keys and values: two tiles of 16 KiB of keys for a short request, so that a lone one keeps many programs busy, sixteen
    for a long one, whose parts would otherwise be a large share of what is read. Products of float32 have no matrix
    instructions: their operands lie in registers, for which eight warps and short tiles leave room."""
    row_bytes, is_float32 = power_of_two(head_dim) * kv_bytes, kv_bytes == 4
    small = card(capability).is_small
    is_columns = kv_bytes == 1 and rows <= COLUMNS_MAX
    tile = max(16 if is_float32 else 32, min(128, (8192 if small or is_columns else 16384) // row_bytes))
    programs = 2 if capability < 90 or small else 4 if is_columns else 3
    is_wide = rows > 16 or is_float32
    num_warps = 8 if is_wide else 4
    if is_wide:  # with many rows over an fp8 cache a thread takes 250 registers, and 64 rows half of the shared memory
        programs = 1 if kv_bytes == 1 or rows > 32 else programs - 1
    if kv_bytes == 1 and rows > 16 and _is_crowded(head_dim, rows, small):
        tile //= 2
        if head_dim <= 64 and rows <= 32:  # two programs of half the warps have as much on its way as one had
            programs, num_warps = 2, 4
    held = card(capability).shared_bytes_multiprocessor // (4 * tile * row_bytes + SHARED_BYTES_RESERVED)
    programs = min(programs, held)  # two tiles of keys and two of values on their way: 64 KiB for heads of 256 in 16 bits
    return DecodeTiling(
        tile=tile,
        split=max(64, 32768 // row_bytes),
        num_warps=num_warps,
        num_stages=3,
        programs=programs,
        registers_max=registers_for(programs, num_warps) if kv_bytes == 1 or head_dim > 128 or queries > 1 else None,
    )


def _is_crowded(head_dim: int, rows: int, small: bool) -> bool:
    """Whether a whole tile of keys over an fp8 cache leaves a thread too few registers, as the compile gate counts them. A
    small card's tiles of long heads are short already; a group that is no power of two costs registers to find a row's query
    and head."""
    if head_dim <= 64:
        return rows <= 32 or small
    return head_dim <= 128 and not small and (rows > 64 or 32 < rows < power_of_two(rows))


def registers_for(programs: int, num_warps: int) -> int:
    """Of a thread at most, so that a multiprocessor holds so many programs. The assembler aims at a number of its own: at 188
    where 170 are left for three programs over an fp8 cache, so that a third of the grid would wait for the others."""
    return min(255, REGISTERS_MULTIPROCESSOR // (32 * num_warps * programs) // 8 * 8)


def max_splits(num_tokens: int, split: int) -> int:
    """The most splits of a request of at most `num_tokens`, whatever card it is on: what `splits_of` can answer."""
    few, some, many, most = (-(-num_tokens // (times * split)) for times in (1, 2, 4, 8))
    return max(1, min(4, few), min(8, some) if few > 4 else 1, min(32, many) if few > 16 else 1, most if few > 128 else 1)


def decode_workspace(
    shape: AttentionShape, max_rows: int, max_blocks: int, kv_dtype: torch.dtype, device: torch.device
) -> DecodeWorkspace:
    """Room for `max_rows` queries, whatever requests of up to `max_blocks` blocks they are of. Llama-3.1-8B, 256 queries over
    32k tokens: 129 MiB."""
    size = _workspace_size(shape, max_rows, max_blocks, kv_dtype, device)
    return DecodeWorkspace(
        torch.empty(*size, shape.head_dim, dtype=torch.float32, device=device),
        torch.empty(size, dtype=torch.float32, device=device),
    )


def workspace_bytes(shape: AttentionShape, max_rows: int, max_blocks: int, kv_dtype: torch.dtype, device: torch.device) -> int:
    """Bytes of what `decode_workspace` makes of these."""
    size = _workspace_size(shape, max_rows, max_blocks, kv_dtype, device)
    return math.prod(size) * (shape.head_dim + 1) * torch.float32.itemsize


def _workspace_size(
    shape: AttentionShape, max_rows: int, max_blocks: int, kv_dtype: torch.dtype, device: torch.device
) -> tuple[int, int, int]:
    return max_rows, shape_splits(shape, max_blocks, shape_tiling(shape, kv_dtype, 1, device)), shape.num_heads


def shape_splits(shape: AttentionShape, max_blocks: int, tiling: DecodeTiling) -> int:
    """The most splits of a request of `max_blocks` blocks. Of one with a window the newest queries, as many as are attended
    together, see the window, a few tokens more and a part of a tile: less than a split beyond the window."""
    num_tokens = max_blocks * shape.block_size
    if shape.sliding_window is not None:
        num_tokens = min(num_tokens, shape.sliding_window + tiling.split)
    return max_splits(num_tokens, tiling.split)


def max_verify_group(shape: AttentionShape, kv_dtype: torch.dtype, device: torch.device) -> int:
    """The most consecutive queries of a request to attend as one group, where each could be a decode of its own: as many as
    leave a multiprocessor two programs, one of which computes while the other waits; the fewest at least, as each tile of
    queries reads all of their context."""
    few, *more = SPLIT_QUERIES
    return max((most for most in more if shape_tiling(shape, kv_dtype, most, device).programs > 1), default=few)


def shape_tiling(shape: AttentionShape, kv_dtype: torch.dtype, max_query_len: int, device: torch.device) -> DecodeTiling:
    rows = query_rows(shape, max_query_len)
    return decode_tiling(shape.head_dim, kv_dtype.itemsize, rows, capability(device), max_query_len)


def scheduled_requests(num_requests: int) -> int:
    """For how many requests the kernels that search among them are made: one variant for few, one for as many as are served."""
    return 32 if num_requests <= 32 else max(256, power_of_two(num_requests))


def query_rows(shape: AttentionShape, max_query_len: int) -> int:
    """Queries of one key head that are attended together."""
    return max_query_len * shape.group


def tile_rows(shape: AttentionShape, max_query_len: int, kv_bytes: int) -> int:
    """Queries of a tile, which holds them; matrix instructions take 16 rows at least, or 8 columns."""
    rows = query_rows(shape, max_query_len)
    return COLUMNS_MAX if kv_bytes == 1 and rows <= COLUMNS_MAX else max(16, power_of_two(rows))


def shape_constants(shape: AttentionShape) -> dict[str, Any]:
    """Constants that follow from the shape alone, by the names that all kernels of paged attention give them."""
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
    """Constants of `attention_decode.split_kernel`, but for REQUESTS; those of MERGE_CONSTANTS are `merge_kernel`'s too."""
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
