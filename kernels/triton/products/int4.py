"""Products with 4-bit weights in groups: a quarter of the bytes of 16-bit weights, unpacked in registers by shift and mask."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from kernels.quantised_weights import CHUNK_COLUMNS, Int4Weight
from kernels.triton.launching.card_properties import capability, card, multiprocessors, power_of_two
from kernels.triton.launching.early_launch import early_launch, wait_for_previous
from kernels.triton.products.dequantised_slabs import multiply_slabs, takes_slabs
from kernels.triton.products.hopper_rows import multiply_few_rows
from kernels.triton.products.int4_codes import COLUMNS, RUN, RUNS, accumulate_int4, unpack_scales
from kernels.triton.products.split_k import CONVERT, SPLITS_MAX, choose_splits, reduce_and_store, split_workspace

SPLIT_K_ROWS_MAX = 64
OUTPUTS = 128
"""Outputs per program, to amortise what a step costs besides its weights; in a gated program of both halves together."""


@dataclass(frozen=True, slots=True)
class Int4Tiles:
    """Tile of one program, in steps of 128 columns. `splits`: programs among which the columns of a tile are split."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    splits: int = 1


@triton.jit(do_not_specialize=["M"])
def linear_int4_kernel(
    x_ptr,
    words_ptr,
    scales_zeros_ptr,
    bias_ptr,
    out_ptr,
    partials_ptr,
    counters_ptr,
    M,
    N,
    K,
    stride_x,
    stride_out,
    num_chunks,
    split_chunks,
    GROUP: tl.constexpr,
    BFLOAT_SCALES: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    row_tiles = tl.cdiv(M, BLOCK_M)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    # Row tiles of the same columns are consecutive: the first brings their weights into the L2 cache for the others.
    rows = (tile % row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tile // row_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    first, last = 0, num_chunks
    if SPLITS > 1:
        first = split * split_chunks
        last = min(first + split_chunks, num_chunks)
    wait_for_previous(EARLY)
    acc = accumulate_int4(
        x_ptr, rows, rows < M, stride_x, words_ptr, scales_zeros_ptr, columns, columns < N, N, K, first, last,
        GROUP=GROUP, BFLOAT_SCALES=BFLOAT_SCALES, EVEN_K=EVEN_K, STAGES=STAGES,
    )  # fmt: skip
    reduce_and_store(
        acc, out_ptr, bias_ptr, partials_ptr, counters_ptr, tile, split, rows, columns, M, N, stride_out,
        SPLITS=SPLITS, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
    )  # fmt: skip


@triton.jit
def dequantise_int4_kernel(
    words_ptr, scales_zeros_ptr, out_ptr, N, first_row, num_rows, stride_out,
    GROUP: tl.constexpr, BFLOAT_SCALES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Dequantises rows first_row … first_row + num_rows - 1 of one chunk → out: [num_rows, 128 · chunks]"""
    chunk = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offsets = tl.arange(0, RUN)
    mask = (rows < num_rows)[:, None]
    source = words_ptr + (chunk.to(tl.int64) * N + first_row) * RUN
    words = tl.load(source + rows[:, None] * RUN + offsets[None, :], mask=mask, other=0).to(tl.int32)
    for run in tl.static_range(RUNS):
        k = chunk * COLUMNS + RUN * run
        scale_zero = tl.load(scales_zeros_ptr + (k // GROUP) * N + first_row + rows, mask=rows < num_rows, other=0)
        codes = (words >> (4 * run)) & 15
        values = (codes - (scale_zero >> 16)[:, None]).to(tl.float32) * unpack_scales(scale_zero, BFLOAT_SCALES)[:, None]
        out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_out + k + offsets[None, :]
        tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), mask=mask)


def linear_int4(
    x: torch.Tensor, weight: Int4Weight, *, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """out[m, n] = Σ_g scale[g, n] · Σ_{k in g} x[m, k] · (code[n, k] - zero[g, n]) + bias[n]; x: [M, K] 16 bits → [M, N]

    The layout is `Int4Weight`'s; zero points are subtracted before the sum over a group and its scale is applied after it, so
    the codes are multiplied as exact integers (AWQ: arXiv 2306.00978, GPTQ: arXiv 2210.17323). A shift and a mask convert codes
    to floats by putting them under a fixed exponent. For M ≤ 16 on Hopper, and groups of whole chunks, `fused_int4_rows`; up
    to 64 split-K (arXiv 2402.00025) with a fixed order of addition; up to 512 rows tiles of 64 or 128 rows; above,
    slabs (`dequantised_slabs`) of x's type, to which weights are rounded once. If packing permuted the columns, those of x are
    permuted first. Reads N·K / 2 + 4·N·K / group bytes of weights once per row tile, or once and
    2·N·K of slabs, writes 2·M·N; 2·M·N·K operations. Rows beyond M, columns beyond N and K are masked.
    Accumulates in float32. Raises ValueError for an x of 32 bits.
    """
    check_int4_rows(x)
    out = x.new_empty(x.shape[0], weight.num_rows) if out is None else out
    if not x.shape[0] or multiply_few_rows(x, weight, bias, out):
        return out
    if weight.permutation is not None:
        x = x.index_select(1, weight.permutation)
    if takes_slabs(x, out):
        return multiply_slabs(x, partial(dequantise_rows, weight), weight.words.shape[0] * CHUNK_COLUMNS, bias, out)
    shape = weight.num_rows, weight.num_columns
    return _launch(x, weight, int4_tiles(x.shape[0], *shape, capability(x.device), multiprocessors(x.device)), bias, out)


def check_int4_rows(x: torch.Tensor) -> None:
    """Raises ValueError unless x has 16 bits: tensor cores multiply no wider rows, and codes are unpacked to x's type."""
    if x.element_size() != 2:
        raise ValueError(f"weights of 4 bits are multiplied with rows of 16 bits, not {x.dtype}")


def int4_tiles(num_rows: int, num_outputs: int, num_columns: int, capability: int, multiprocessors: int) -> Int4Tiles:
    """Tiles for a weight [N, K]. Those of few rows hold all of them, and their columns are split."""
    if num_rows > SPLIT_K_ROWS_MAX:
        return Int4Tiles(128 if capability == 90 else 64, OUTPUTS, num_warps=8, num_stages=3)
    block_m = max(16, power_of_two(num_rows))
    low, high = (4, 3) if card(capability).is_small else (6, 4)  # loads in flight, fewer beside more rows of x
    splits = int4_splits(-(-num_outputs // OUTPUTS), num_columns, multiprocessors, splits_max=16)
    return Int4Tiles(block_m, OUTPUTS, num_warps=4, num_stages=low if block_m < SPLIT_K_ROWS_MAX else high, splits=splits)


def int4_splits(output_tiles: int, num_columns: int, multiprocessors: int, *, splits_max: int = SPLITS_MAX) -> int:
    """Splits of the columns of a tile of OUTPUTS outputs. A step reads 8 KiB of weights and takes some 350 instructions per
    warp, which a multiprocessor hides behind those of two other programs."""
    steps, step_bytes = -(-num_columns // CHUNK_COLUMNS), OUTPUTS * CHUNK_COLUMNS // 2
    return choose_splits(output_tiles, steps, multiprocessors, step_bytes, occupancy=CONVERT, splits_max=splits_max)


def _launch(
    x: torch.Tensor, weight: Int4Weight, tiles: Int4Tiles, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    num_rows, num_columns = x.shape
    num_chunks, num_outputs, _ = weight.words.shape
    num_tiles = -(-num_rows // tiles.block_m) * -(-num_outputs // tiles.block_n)
    linear_int4_kernel[(num_tiles, tiles.splits)](
        x, weight.words, weight.scales_zeros, bias, out,
        *split_workspace(num_tiles, tiles.splits, tiles.block_m * tiles.block_n, x.device),
        num_rows, num_outputs, num_columns, x.stride(0), out.stride(0), num_chunks, -(-num_chunks // tiles.splits),
        GROUP=weight.group_size, BFLOAT_SCALES=weight.scale_dtype is torch.bfloat16,
        EVEN_K=num_columns % CHUNK_COLUMNS == 0, SPLITS=tiles.splits,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, STAGES=tiles.num_stages, num_warps=tiles.num_warps,
        **early_launch(x.device, num_rows),
    )  # fmt: skip
    return out


def dequantise_rows(weight: Int4Weight, first: int, out: torch.Tensor) -> None:
    """out[r, k] = scale · (code - zero) of row first + r, columns in packed order: [R, 128 · chunks] of 16 bits

    Reads R·K / 2 + 4·R·K / group bytes, writes 2·R·K; two operations per weight, in float32, rounded once. Rows beyond R are
    masked.
    """
    num_chunks, num_outputs, _ = weight.words.shape
    dequantise_int4_kernel[(num_chunks, triton.cdiv(out.shape[0], 64))](
        weight.words, weight.scales_zeros, out, num_outputs, first, out.shape[0], out.stride(0),
        GROUP=weight.group_size, BFLOAT_SCALES=weight.scale_dtype is torch.bfloat16, BLOCK_N=64, num_warps=4,
    )  # fmt: skip
