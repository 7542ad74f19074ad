"""Sorts tokens by expert on the card, and locates the tile of the expert that each program computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.launching.card_properties import card

SORT_BLOCK = 1024
"""Ids of a step of a program of four warps, eight per thread."""


@dataclass(frozen=True, slots=True)
class SortedTokens:
    """Assignments of tokens to experts, stably sorted by expert; assignment t · chosen + j is the j-th choice of token t.

    order: [T · chosen] int32, the assignments; expert e has those at offsets[e] to offsets[e + 1] - 1. offsets: [E + 1] int32.
    From offsets[E] on (tokens without an expert) order is not written."""

    order: torch.Tensor
    offsets: torch.Tensor
    num_chosen: int


@dataclass(frozen=True, slots=True)
class GroupTiles:
    """Tile of one program; the gated kernel reads `block_n` rows of gate and as many of up."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@triton.jit(do_not_specialize=["num_assignments"])
def sort_kernel(expert_ids_ptr, order_ptr, offsets_ptr, num_assignments, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Program e counts the assignments of lower experts, then stores its own in order; the last one also stores their end."""
    expert = tl.program_id(0)
    offset = 0
    for block_start in range(0, num_assignments, BLOCK):
        assignments = block_start + tl.arange(0, BLOCK)
        ids = tl.load(expert_ids_ptr + assignments, mask=assignments < num_assignments, other=EXPERTS)
        offset += tl.sum((ids < expert).to(tl.int32), axis=0)
    tl.store(offsets_ptr + expert, offset)
    for block_start in range(0, num_assignments, BLOCK):
        assignments = block_start + tl.arange(0, BLOCK)
        ids = tl.load(expert_ids_ptr + assignments, mask=assignments < num_assignments, other=EXPERTS)
        is_own = (ids == expert).to(tl.int32)
        tl.store(order_ptr + offset + tl.cumsum(is_own, axis=0) - 1, assignments, mask=is_own > 0)
        offset += tl.sum(is_own, axis=0)
    if expert == EXPERTS - 1:
        tl.store(offsets_ptr + EXPERTS, offset)


@triton.jit
def locate_tile(offsets_ptr, tile, EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr):
    """→ the expert of a tile (EXPERTS beyond the last tile), the tile's first sorted row, and the end of the expert's rows.

    Found by a cumulative sum of the experts' numbers of tiles.
    """
    experts = tl.arange(0, EXPERTS_BLOCK)
    begins = tl.load(offsets_ptr + experts, mask=experts < EXPERTS, other=0)
    ends = tl.load(offsets_ptr + experts + 1, mask=experts < EXPERTS, other=0)
    tiles = (ends - begins + BLOCK_M - 1) // BLOCK_M
    cumulative_tiles = tl.cumsum(tiles, axis=0)
    expert = tl.sum((cumulative_tiles <= tile).to(tl.int32), axis=0)
    is_own = experts == expert
    first = tl.sum(tl.where(is_own, begins + (tile - cumulative_tiles + tiles) * BLOCK_M, 0), axis=0)
    return expert, first, tl.sum(tl.where(is_own, ends, 0), axis=0)


def sort_by_expert(expert_ids: torch.Tensor, num_experts: int) -> SortedTokens:
    """expert_ids: [T, chosen] integers → the assignments of every expert: one program per expert reads all ids twice.

    order is the stable permutation with expert_ids[order] ascending, offsets[e] the number of ids below e; ids of E stand for
    no expert and are left out. Source: counting sort (Knuth, volume 3, section 5.2, algorithm D). Reads 2 · E · T · chosen ids,
    from the L2 cache except the first time; writes 4 bytes each; two integer additions per id. Ids beyond T · chosen
    are masked; sums in int32.
    """
    num_assignments = expert_ids.numel()
    order = torch.empty(num_assignments, dtype=torch.int32, device=expert_ids.device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=expert_ids.device)
    sort_kernel[(num_experts,)](expert_ids.contiguous(), order, offsets, num_assignments, num_experts, SORT_BLOCK)
    return SortedTokens(order, offsets, expert_ids.shape[1])


def max_row_tiles(num_assignments: int, num_experts: int, block_m: int) -> int:
    """The most tiles of `block_m` rows that assignments may need: each expert that has any may have one that is not full."""
    return num_assignments // block_m + min(num_experts, num_assignments)


def group_tiles(rows: float, capability: int, *, gated: bool) -> GroupTiles:
    """rows: tokens per expert if they were spread evenly.

    With few of them, reading the weights takes longest: tiles are as low as possible, and steps of 16 KiB of 16-bit weights
    are in flight. With many, a tile of 128 rows reads its weights once for all of them."""
    is_small = card(capability).is_small
    if rows <= 32:
        block_m = 16 if rows <= 16 else 32
        return GroupTiles(block_m, 32 if gated else 64, 128, num_warps=4, num_stages=4 if is_small else 5)
    if rows <= 96:
        return GroupTiles(64, 64, 64, num_warps=4, num_stages=3 if is_small else 4)
    return GroupTiles(128, 64 if gated else 128, 64, num_warps=8, num_stages=2 if is_small else 3)
