"""Tiled GEMM x Wᵀ, for weights that need only a cast and, at most, a scale on the sum.

The kernel of linear.py, int8.py and fp8.py: it reads W once, converts it to x's type in registers and scales the
sum, so that a scale costs nothing per weight. Those modules choose the tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import torch
import triton
import triton.language as tl

from kernels.triton.launching.card_properties import power_of_two
from kernels.triton.launching.early_launch import early_launch, wait_for_previous
from kernels.triton.products.split_k import (
    CONVERT,
    NUM_COUNTERS,
    STREAM,
    Occupancy,
    choose_splits,
    reduce_and_store,
    split_cost,
    split_workspace,
)

MEMORY_BOUND_ROWS_MAX = 64  # up to this many rows, reading the weights takes longer than multiplying
GROUP_ROWS = 8  # row tiles computed together over the same columns, so that x and W stay in the L2 cache


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile of one program. `splits`: programs among which the columns of a tile are split."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1

    def with_splits(self, splits: int) -> Self:
        return replace(self, splits=splits)


_Tiles = TypeVar("_Tiles", bound=Tiles)


def cheapest_tiles(
    candidates: Sequence[_Tiles],
    weight_shape: Sequence[int],
    multiprocessors: int,
    column_bytes: int,
    *,
    occupancy: Occupancy = STREAM,
) -> _Tiles:
    """The candidate with the lowest `split_cost` for a weight [N, K], with its number of splits; the same for any number of
    rows. column_bytes: read by a program per output and column."""
    num_outputs, num_columns = weight_shape

    def cost_and_tiles(tiles: _Tiles) -> tuple[float, _Tiles]:
        output_tiles, steps = -(-num_outputs // tiles.block_n), -(-num_columns // tiles.block_k)
        work = output_tiles, steps, multiprocessors, tiles.block_n * tiles.block_k * column_bytes
        splits = choose_splits(*work, occupancy=occupancy)
        return split_cost(*work, splits, occupancy=occupancy), tiles.with_splits(splits)

    return min(map(cost_and_tiles, candidates), key=lambda pair: pair[0])[1]


FLOAT32_FEW_ROWS = Tiles(16, 32, 64, num_warps=4, num_stages=4)
FLOAT32_MANY_ROWS = Tiles(32, 64, 32, num_warps=4, num_stages=2)


@functools.lru_cache(maxsize=1024)
def byte_tiles(
    num_rows: int, weight_shape: tuple[int, ...], capability: int, multiprocessors: int, *, row_bytes: int = 2
) -> Tiles:
    """Tiles for 8-bit weights [N, K]. Up to 64 rows they are as low as possible, with 8 KiB of weights per step. `row_bytes`:
    bytes of an element of x. No matrix instruction multiplies 32-bit rows: for them registers are the limit."""
    if row_bytes == 4:
        tiles = FLOAT32_FEW_ROWS if num_rows <= FLOAT32_FEW_ROWS.block_m else FLOAT32_MANY_ROWS
    elif num_rows > MEMORY_BOUND_ROWS_MAX:
        tiles = Tiles(128, 128, 64, num_warps=8, num_stages=3 if capability < 90 else 4)
    else:
        block_m = max(16, power_of_two(num_rows))
        tiles = Tiles(block_m, 64, 128, num_warps=4, num_stages=6 if block_m == 16 else 4)
    num_tiles = -(-num_rows // tiles.block_m) * -(-weight_shape[0] // tiles.block_n)
    if num_rows > MEMORY_BOUND_ROWS_MAX or num_tiles > NUM_COUNTERS:
        return tiles
    return cheapest_tiles([tiles], weight_shape, multiprocessors, 1, occupancy=CONVERT)


@triton.jit
def cast_weight(weight, DTYPE: tl.constexpr):
    """Converts 8-bit weights to the rows' type, which holds every code exactly; weights of that type are unchanged."""
    if weight.dtype.is_fp8() and not DTYPE.is_fp8():
        weight = weight.to(tl.float32)
    return weight.to(DTYPE)


@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    x_ptr,
    weight_ptr,
    x_scales_ptr,
    weight_scales_ptr,
    bias_ptr,
    out_ptr,
    partials_ptr,
    counters_ptr,
    M,
    N,
    K,
    stride_x,
    stride_weight,
    stride_out,
    split_columns,
    ROW_SCALES: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One tile of out, or one split of it. ROW_SCALES: a scale per row of x; else one for all rows."""
    row_tiles = tl.cdiv(M, BLOCK_M)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    tiles_per_group = GROUP_M * tl.cdiv(N, BLOCK_N)
    first_row_tile = (tile // tiles_per_group) * GROUP_M
    group_row_tiles = min(row_tiles - first_row_tile, GROUP_M)
    row_tile = first_row_tile + (tile % tiles_per_group) % group_row_tiles
    column_tile = (tile % tiles_per_group) // group_row_tiles
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, column_mask = rows < M, columns < N
    k_offsets = tl.arange(0, BLOCK_K)
    start, end = 0, K
    if SPLITS > 1:
        start = split * split_columns
        end = min(start + split_columns, K)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * stride_x + k_offsets[None, :]
    w_base_ptr = weight_ptr + (column_tile * BLOCK_N).to(tl.int64) * stride_weight
    w_ptrs = w_base_ptr + tl.arange(0, BLOCK_N)[None, :] * stride_weight + k_offsets[:, None]
    wait_for_previous(EARLY)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(start, end, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            x = tl.load(x_ptrs + k, mask=row_mask[:, None], other=0.0)
            weight = tl.load(w_ptrs + k, mask=column_mask[None, :], other=0.0, eviction_policy="evict_first")
        else:
            x = tl.load(x_ptrs + k, mask=row_mask[:, None] & (k_offsets < K - k)[None, :], other=0.0)
            w_mask = column_mask[None, :] & (k_offsets < K - k)[:, None]
            weight = tl.load(w_ptrs + k, mask=w_mask, other=0.0, eviction_policy="evict_first")
        if x.dtype == tl.float32:
            acc = tl.dot(x, cast_weight(weight, x.dtype), acc, input_precision="ieee")
        else:
            # Hopper accumulates fp8 products with about 14 bits: sums are promoted to float32 after each tile.
            acc = tl.dot(x, cast_weight(weight, x.dtype), acc, max_num_imprecise_acc=BLOCK_K)
    if weight_scales_ptr is not None:
        acc *= tl.load(weight_scales_ptr + columns, mask=column_mask, other=0.0)[None, :]
    if x_scales_ptr is not None:
        if ROW_SCALES:
            acc *= tl.load(x_scales_ptr + rows, mask=row_mask, other=0.0)[:, None]
        else:
            acc *= tl.load(x_scales_ptr)
    reduce_and_store(
        acc, out_ptr, bias_ptr, partials_ptr, counters_ptr, tile, split, rows, columns, M, N, stride_out,
        SPLITS=SPLITS, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
    )  # fmt: skip


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    tiles: Tiles,
    out: torch.Tensor,
    *,
    x_scales: torch.Tensor | None = None,
    weight_scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launches `linear_kernel`. x: [M, K], each row contiguous; weight: [N, K]; out: [M, N], each row contiguous"""
    num_rows, num_columns = x.shape
    num_outputs = weight.shape[0]
    num_tiles = -(-num_rows // tiles.block_m) * -(-num_outputs // tiles.block_n)
    steps = -(-num_columns // tiles.block_k)
    split_columns = -(-steps // tiles.splits) * tiles.block_k
    linear_kernel[(num_tiles, tiles.splits)](
        x, weight, x_scales, weight_scales, bias, out,
        *split_workspace(num_tiles, tiles.splits, tiles.block_m * tiles.block_n, x.device),
        num_rows, num_outputs, num_columns, x.stride(0), weight.stride(0), out.stride(0), split_columns,
        ROW_SCALES=x_scales is not None and x_scales.numel() > 1,
        EVEN_K=num_columns % tiles.block_k == 0,
        SPLITS=tiles.splits, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k,
        GROUP_M=GROUP_ROWS, STAGES=tiles.num_stages, num_warps=tiles.num_warps,
        **early_launch(x.device, num_rows),
    )  # fmt: skip
    return out
