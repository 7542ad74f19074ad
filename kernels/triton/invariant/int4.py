"""Batch-invariant products with 4-bit weights: the method of linear.py for grouped codes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.quantised_weights import CHUNK_COLUMNS, Int4Weight
from kernels.triton.invariant.linear import invariant_workspace, programs_per_tile, reduce_splits, split_range
from kernels.triton.launching.card_properties import multiprocessors
from kernels.triton.launching.early_launch import early_launch, wait_for_previous
from kernels.triton.products.int4 import OUTPUTS, Int4Tiles, check_int4_rows, int4_splits
from kernels.triton.products.int4_codes import accumulate_int4


def invariant_int4_tiles(num_outputs: int, num_columns: int, multiprocessors: int) -> Int4Tiles:
    """Determined by the weight alone; eight warps, since a program holds the sums of a group, of a split and of all splits."""
    splits = int4_splits(-(-num_outputs // OUTPUTS), num_columns, multiprocessors)
    return Int4Tiles(64, OUTPUTS, num_warps=8, num_stages=3, splits=splits)


@triton.jit(do_not_specialize=["M"])
def invariant_int4_kernel(
    x_ptr, words_ptr, scales_zeros_ptr, bias_ptr, out_ptr, partials_ptr, counters_ptr,
    M, N, K, stride_x, stride_out, num_chunks, split_chunks,
    GROUP: tl.constexpr, BFLOAT_SCALES: tl.constexpr, EVEN_K: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One tile of out, all of its splits or one of them. Row tiles of the same columns are consecutive."""
    wait_for_previous(EARLY)
    row_tiles = tl.cdiv(M, BLOCK_M)
    tile = tl.program_id(0)
    rows = (tile % row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tile // row_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, column_mask = rows < M, columns < N
    first, last = split_range(SPLITS)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for split in tl.range(first, last, num_stages=1):
        sums += accumulate_int4(
            x_ptr, rows, row_mask, stride_x, words_ptr, scales_zeros_ptr, columns, column_mask, N, K,
            split * split_chunks, min(split * split_chunks + split_chunks, num_chunks),
            GROUP=GROUP, BFLOAT_SCALES=BFLOAT_SCALES, EVEN_K=EVEN_K, STAGES=STAGES,
        )  # fmt: skip
    mask = row_mask[:, None] & column_mask[None, :]
    sums, is_last = reduce_splits(sums, partials_ptr, counters_ptr, tile, mask, SPLITS, BLOCK_M, BLOCK_N)
    if is_last:
        if bias_ptr is not None:
            sums += tl.load(bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
        out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_out + columns[None, :]
        tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=mask)


def invariant_int4(x: torch.Tensor, weight: Int4Weight, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `kernels.triton.products.int4.linear_int4`, with a row's bits independent of the batch: x: [M, K] of 16 bits → [M, N]

    Codes are multiplied as exact integers for any number of rows, never unpacked to x's type. Reads N·K / 2 + 4·N·K / group
    bytes of weights per 64 rows; 2·M·N·K operations. Rows beyond M, columns beyond N and K are masked. The sum of a group is
    scaled and added in float32, groups in order, then splits in order. Raises ValueError for an x of 32 bits.
    """
    check_int4_rows(x)
    if weight.permutation is not None:
        x = x.index_select(1, weight.permutation)
    out = x.new_empty(x.shape[0], weight.num_rows)
    num_rows, num_columns = x.shape
    if not num_rows:
        return out
    num_chunks, num_outputs, _ = weight.words.shape
    tiles = invariant_int4_tiles(num_outputs, num_columns, multiprocessors(x.device))
    num_tiles = -(-num_rows // tiles.block_m) * -(-num_outputs // tiles.block_n)
    programs = programs_per_tile(num_tiles, tiles.splits, x.device)
    invariant_int4_kernel[(num_tiles, programs)](
        x, weight.words, weight.scales_zeros, bias, out,
        *invariant_workspace(num_tiles, programs, tiles.block_m * tiles.block_n, x.device),
        num_rows, num_outputs, num_columns, x.stride(0), out.stride(0), num_chunks, -(-num_chunks // tiles.splits),
        GROUP=weight.group_size, BFLOAT_SCALES=weight.scale_dtype is torch.bfloat16,
        EVEN_K=num_columns % CHUNK_COLUMNS == 0, SPLITS=tiles.splits,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, STAGES=tiles.num_stages, num_warps=tiles.num_warps,
        enable_fp_fusion=False, **early_launch(x.device, num_rows),
    )  # fmt: skip
    return out
