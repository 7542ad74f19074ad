"""Batch-invariant products: one tile size for any number of rows, with weights of 32, 16 or 8 bits.

How a row's columns are split depends on the size of the weight alone, every split is summed from zero by the same instructions,
and splits are added in order: by one program if there are many tiles, by the last of several programs to arrive if there are
few.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.quantised_weights import FP8, Fp8Weight, Int8Weight, values_and_scales
from kernels.triton.launching.card_properties import capability, card, multiprocessors
from kernels.triton.launching.early_launch import early_launch, wait_for_previous
from kernels.triton.products.fp8 import check_fp8
from kernels.triton.products.split_k import CONVERT, NUM_COUNTERS, STREAM, arrival_counters, split_workspace
from kernels.triton.products.tiles import Tiles, cast_weight, cheapest_tiles

GROUP_ROWS = 8  # row tiles of the same weights, computed one after another


def invariant_tiles(
    weight_shape: Sequence[int], dtype: torch.dtype, weight_bytes: int, capability: int, multiprocessors: int
) -> Tiles:
    """Determined by the weight [N, K], the type of the rows and the card. Hopper's instruction has at least 64 rows; for its
    unused rows a decode pays a quarter of the time that reading the weights takes."""
    if dtype is torch.float32:  # no matrix instructions: the registers of a thread limit the tile
        tiles = Tiles(32, 64, 32, num_warps=4, num_stages=2)
    else:
        is_small = card(capability).is_small
        num_warps = 8 if dtype is FP8 and capability < 90 else 4  # its sums are promoted into other registers
        tiles = Tiles(64, 128, 64, num_warps=num_warps, num_stages=3 if is_small else 4)
    occupancy = CONVERT if weight_bytes == 1 else STREAM
    return cheapest_tiles([tiles], weight_shape, multiprocessors, weight_bytes, occupancy=occupancy)


def programs_per_tile(num_tiles: int, splits: int, device: torch.device) -> int:
    """One program for each split of a tile, or one for all of them. It affects only the time: the sums are the same."""
    return splits if num_tiles <= NUM_COUNTERS and num_tiles < 2 * multiprocessors(device) else 1


@triton.jit
def reduce_splits(
    sums, partials_ptr, counters_ptr, tile, mask, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """sums: [BLOCK_M, BLOCK_N] float32 of one split or of all → those of all, and whether this program has them. Splits are
    stored and counted as in split_k.py, and added from the first to the last, in the order of a program that sums them all."""
    is_last = tl.num_programs(1) == 1
    if tl.num_programs(1) > 1:
        offsets = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tile_partials = partials_ptr + tile.to(tl.int64) * (SPLITS * BLOCK_M * BLOCK_N) + offsets
        tl.store(tile_partials + tl.program_id(1) * (BLOCK_M * BLOCK_N), sums, mask=mask)
        # The barrier orders the stores of all threads before the increment; acq_rel orders the last program's loads after it.
        tl.debug_barrier()
        is_last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for index in range(SPLITS):
                sums += tl.load(tile_partials + index * (BLOCK_M * BLOCK_N), mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(counters_ptr + tile, 0)
    return sums, is_last


def invariant_workspace(
    num_tiles: int, programs: int, tile_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `split_workspace` for the programs of a tile, but never None, so that one kernel variant serves all."""
    sums, _ = split_workspace(num_tiles, programs, tile_size, device)
    counters = arrival_counters(device)
    return counters.view(torch.float32) if sums is None else sums, counters


@triton.jit
def split_range(SPLITS: tl.constexpr):
    """The range first … last - 1 of a program's splits: its own one, or all if a tile has one program."""
    first, last = 0, SPLITS
    if tl.num_programs(1) > 1:
        first = tl.program_id(1)
        last = first + 1
    return first, last


@triton.jit(do_not_specialize=["M"])
def invariant_kernel(
    x_ptr, weight_ptr, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr, partials_ptr, counters_ptr,
    M, N, K, stride_x, stride_weight, stride_out, split_columns,
    ROW_SCALES: tl.constexpr, EVEN_K: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One tile of out, all of its splits or one of them."""
    wait_for_previous(EARLY)
    row_tiles = tl.cdiv(M, BLOCK_M)
    tile = tl.program_id(0)
    tiles_per_group = GROUP_M * tl.cdiv(N, BLOCK_N)
    first_row_tile = (tile // tiles_per_group) * GROUP_M
    group_row_tiles = min(row_tiles - first_row_tile, GROUP_M)
    rows = (first_row_tile + (tile % tiles_per_group) % group_row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = ((tile % tiles_per_group) // group_row_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, column_mask = rows < M, columns < N
    k_offsets = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * stride_x + k_offsets[None, :]
    w_ptrs = weight_ptr + columns.to(tl.int64)[None, :] * stride_weight + k_offsets[:, None]
    first, last = split_range(SPLITS)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for split in tl.range(first, last, num_stages=1):
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(split * split_columns, min(split * split_columns + split_columns, K), BLOCK_K, num_stages=STAGES):
            x_mask, w_mask = row_mask[:, None], column_mask[None, :]
            if not EVEN_K:
                x_mask = x_mask & (k_offsets < K - k)[None, :]
                w_mask = w_mask & (k_offsets < K - k)[:, None]
            x = tl.load(x_ptrs + k, mask=x_mask, other=0.0)
            weight = tl.load(w_ptrs + k, mask=w_mask, other=0.0)
            acc = tl.dot(x, cast_weight(weight, x.dtype), acc, input_precision="ieee", max_num_imprecise_acc=BLOCK_K)
        sums += acc
    mask = row_mask[:, None] & column_mask[None, :]
    sums, is_last = reduce_splits(sums, partials_ptr, counters_ptr, tile, mask, SPLITS, BLOCK_M, BLOCK_N)
    if is_last:
        if weight_scales_ptr is not None:
            sums *= tl.load(weight_scales_ptr + columns, mask=column_mask, other=0.0)[None, :]
        if x_scales_ptr is not None:
            if ROW_SCALES:
                sums *= tl.load(x_scales_ptr + rows, mask=row_mask, other=0.0)[:, None]
            else:
                sums *= tl.load(x_scales_ptr)
        if bias_ptr is not None:
            sums += tl.load(bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
        out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_out + columns[None, :]
        tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=mask)


def invariant_linear(
    x: torch.Tensor,
    weight: torch.Tensor | Int8Weight | Fp8Weight,
    *,
    x_scales: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[m, n] = x_scales[m] · scales[n] · Σ_k x[m, k] · values[n, k] + bias[n]; x: [M, K] → [M, N], independent of the batch.

    x: 16 or 32 bits, or e4m3 with x_scales [M, 1] or [1] float32 and an `out_dtype`; weight: [N, K] of x's type, or of 8
    bits. Source: a fixed tile and a fixed division of the columns ("Defeating nondeterminism in LLM inference", Thinking
    Machines Lab, 2025). Reads the weight once per 64 rows; 2·M·N·K operations, all of which a partly filled tile does
    the same. Rows beyond M and columns beyond N and K are masked. Accumulates in float32. Raises ValueError for e4m3 on a card
    without it.
    """
    values, scales = values_and_scales(weight)
    if values.dtype is FP8:
        check_fp8(x.device)
    (num_rows, num_columns), num_outputs = x.shape, values.shape[0]
    out = torch.empty(num_rows, num_outputs, dtype=out_dtype or x.dtype, device=x.device)
    if not num_rows:
        return out
    tiles = invariant_tiles(values.shape, x.dtype, values.element_size(), capability(x.device), multiprocessors(x.device))
    num_tiles = -(-num_rows // tiles.block_m) * -(-num_outputs // tiles.block_n)
    programs = programs_per_tile(num_tiles, tiles.splits, x.device)
    invariant_kernel[(num_tiles, programs)](
        x, values, x_scales, scales, bias, out,
        *invariant_workspace(num_tiles, programs, tiles.block_m * tiles.block_n, x.device),
        num_rows, num_outputs, num_columns, x.stride(0), values.stride(0), out.stride(0),
        triton.cdiv(triton.cdiv(num_columns, tiles.block_k), tiles.splits) * tiles.block_k,
        ROW_SCALES=x_scales is not None and x_scales.numel() > 1, EVEN_K=num_columns % tiles.block_k == 0,
        SPLITS=tiles.splits, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, GROUP_M=GROUP_ROWS,
        STAGES=tiles.num_stages, num_warps=tiles.num_warps, enable_fp_fusion=False, **early_launch(x.device, num_rows),
    )  # fmt: skip
    return out
