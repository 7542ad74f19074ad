"""Quantises rows to e4m3 with one scale per row; other kernels quantise their results with the same function."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.quantised_weights import FP8
from kernels.triton.rows.tiles import row_tile


@triton.jit
def clamp_to_e4m3(value):
    """Clamps to ±448, the range of e4m3; beyond it cards and interpreter convert differently. NaN stays NaN."""
    return tl.clamp(value, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def store_e4m3_rows(value, quantised, scales, rows, columns, mask, stride, num_rows):
    """Stores value: [ROWS, BLOCK] float32, zero where masked, as e4m3 (448 is its largest value) and one scale per row."""
    row_absmax = tl.maximum(tl.max(tl.abs(value), axis=1), 1e-12)
    clamped = clamp_to_e4m3(value * (448.0 / row_absmax)[:, None])
    tl.store(quantised + rows[:, None] * stride + columns[None, :], clamped.to(tl.float8e4nv), mask=mask)
    tl.store(scales + rows, row_absmax / 448.0, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def quantize_rows_kernel(
    x, quantised, scales, num_rows, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    value = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    store_e4m3_rows(value, quantised, scales, rows, columns, mask, WIDTH, num_rows)


def quantize_rows_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """scale = max|x| / 448, e4m3 = round(x / scale): x: [T, width], row stride ≥ width → [T, width] and scales [T, 1] float32

    Source: arXiv 2209.05433; one scale per row, as `torch._scaled_mm` expects. Reads T · width elements of
    fp32, fp16 or bf16, writes as many bytes and 4 per row; 3 operations per element, in float32. Columns beyond `width` and
    rows beyond T are masked. A row below 1e-12 is scaled as if that were its largest element.
    """
    num_rows, width = x.shape
    quantised, scales = allocate_fp8_rows(num_rows, width, x.device)
    tile = row_tile(width)
    if num_rows:
        quantize_rows_kernel[(triton.cdiv(num_rows, tile.rows),)](
            x, quantised, scales, num_rows, x.stride(0), width, tile.block, tile.rows, num_warps=tile.num_warps
        )
    return quantised, scales


def allocate_fp8_rows(num_rows: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for e4m3 [T, width] and its scales [T, 1] float32."""
    return torch.empty(num_rows, width, dtype=FP8, device=device), torch.empty(num_rows, 1, dtype=torch.float32, device=device)
