"""Fused products of a decode step with 4-bit weights: those of fused_linear.py, with codes dequantised in registers.

The loop over the columns is that of int4.py. A gated program multiplies equal numbers of outputs of both halves in the
same loop, side by side, and separates their sums at the end. Reads N·K / 2 + 4·N·K / group bytes of weights once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.quantised_weights import CHUNK_COLUMNS, Int4Weight
from kernels.triton.launching.card_properties import power_of_two
from kernels.triton.launching.early_launch import early_launch, wait_for_previous
from kernels.triton.products.epilogue import Epilogue, apply_epilogue, load_squares
from kernels.triton.products.int4 import OUTPUTS, Int4Tiles, check_int4_rows, int4_splits
from kernels.triton.products.int4_codes import accumulate_int4
from kernels.triton.products.split_k import split_workspace

ROWS = 16
STAGES = 4  # with more loads in flight fewer programs fit: down of Llama-8B took 17.2 µs with 6, 14.9 with 4


@triton.jit(do_not_specialize=["M"])
def fused_int4_kernel(
    x, words, scales_zeros, bias, squares, residual, norm_weight, out, weighted, squares_out, partials, arrivals,
    M, N, K, x_stride, num_chunks, split_chunks, num_squares, eps, alpha,
    GATE: tl.constexpr, GROUP: tl.constexpr, BFLOAT_SCALES: tl.constexpr, EVEN_K: tl.constexpr, SQUARES_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (tile, split): BLOCK_N columns of out, summed over the chunks of its split. N: columns of out"""
    HALVES: tl.constexpr = 1 if GATE is None else 2
    tile, split = tl.program_id(0), tl.program_id(1)
    rows, columns = tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, HALVES * BLOCK_N)
    lane_columns = tile * BLOCK_N + lanes % BLOCK_N
    outputs = lane_columns + (lanes // BLOCK_N) * N
    first, last = 0, num_chunks
    if SPLITS > 1:
        first = split * split_chunks
        last = min(first + split_chunks, num_chunks)
    wait_for_previous(EARLY)
    row_squares = load_squares(squares, rows, M, num_squares, SQUARES_BLOCK)
    product = accumulate_int4(
        x, rows, rows < M, x_stride, words, scales_zeros, outputs, lane_columns < N, HALVES * N, K, first, last,
        GROUP=GROUP, BFLOAT_SCALES=BFLOAT_SCALES, EVEN_K=EVEN_K, STAGES=STAGES,
    )  # fmt: skip
    up = product
    if GATE is not None:
        product, up = tl.split(tl.permute(tl.reshape(product, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
    apply_epilogue(
        product, up, None, bias, squares, row_squares, residual, norm_weight, out, weighted, squares_out,
        partials, arrivals, tile, split, rows, columns, M, N, K, eps, alpha, GATE, SPLITS, BLOCK_M, BLOCK_N,
    )  # fmt: skip


def fused_int4_tiles(num_outputs: int, num_columns: int, multiprocessors: int, *, gated: bool) -> Int4Tiles:
    """The tile of `int4_tiles` for few rows; the same for any number of rows."""
    block_n = OUTPUTS // 2 if gated else OUTPUTS
    splits = int4_splits(-(-num_outputs // block_n), num_columns, multiprocessors)
    return Int4Tiles(ROWS, block_n, num_warps=4, num_stages=STAGES, splits=splits)


def launch(x: torch.Tensor, weight: Int4Weight, epilogue: Epilogue, tiles: Int4Tiles) -> None:
    """As fused_linear.py, with its formula and source. x: [M, K] of 16 bits, columns in the checkpoint's order.

    2 · M · N · K operations on tensor cores. Rows beyond M, outputs beyond N and columns beyond K are masked. Sums of a group
    are scaled and added in float32, splits in their order.
    """
    check_int4_rows(x)
    if weight.permutation is not None:
        x = x.index_select(1, weight.permutation)
    (num_rows, num_columns), outputs = x.shape, epilogue.out.shape[1]
    num_tiles, num_chunks = triton.cdiv(outputs, tiles.block_n), weight.words.shape[0]
    size = tiles.block_m * tiles.block_n * (1 if epilogue.gate is None else 2)
    fused_int4_kernel[(num_tiles, tiles.splits)](
        x, weight.words, weight.scales_zeros, *epilogue.tensors,
        *split_workspace(num_tiles, tiles.splits, size, x.device),
        num_rows, outputs, num_columns, x.stride(0), num_chunks, triton.cdiv(num_chunks, tiles.splits), epilogue.num_squares,
        epilogue.eps, epilogue.alpha,
        GATE=epilogue.gate, GROUP=weight.group_size, BFLOAT_SCALES=weight.scale_dtype is torch.bfloat16,
        EVEN_K=num_columns % CHUNK_COLUMNS == 0, SQUARES_BLOCK=power_of_two(epilogue.num_squares), SPLITS=tiles.splits,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, STAGES=tiles.num_stages, num_warps=tiles.num_warps,
        **early_launch(x.device, num_rows),
    )  # fmt: skip
