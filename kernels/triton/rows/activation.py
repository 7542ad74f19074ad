"""Gated activations between the two products of a feed-forward layer, in the model's dtype or as e4m3 rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.triton.launching.early_launch import early_launch, wait_for_previous
from kernels.triton.rows.fp8 import allocate_fp8_rows, store_e4m3_rows
from kernels.triton.rows.tiles import row_tile

MANY_ROWS_MIN = 256
"""From this many rows on there are enough programs for every multiprocessor, and wider tiles have less start-up cost."""


class ColumnTile(NamedTuple):
    """`block` columns of one row, computed by `num_warps` warps."""

    block: int
    num_warps: int


def column_tile(num_rows: int, inner: int) -> ColumnTile:
    """Each thread has 8 elements (16 bytes) with few rows and 16 with many. No sum depends on it."""
    if num_rows < MANY_ROWS_MIN:
        return ColumnTile(512, 2)
    return ColumnTile(2048, 4) if inner % 2048 == 0 else ColumnTile(1024, 4)


@triton.jit
def gated_activation(gate, up, GELU: tl.constexpr):
    """gate and up: float32 → act(gate) · up. Both activations are gate · sigmoid(z), in powers of two."""
    exponent = -1.4426950408889634 * gate
    if GELU:
        # 0.5 (1 + tanh(y)) = sigmoid(2y), y = √(2/π) (gate + 0.044715 gate³); 2 √(2/π) log2(e) = 2.3022082
        exponent = -2.302208198144325 * (gate + 0.044715 * gate * gate * gate)
    # The clamp keeps exp2 from overflowing; 2^-126 of any gate that occurs is negligible.
    return gate / (1.0 + tl.exp2(tl.minimum(exponent, 126.0))) * up


@triton.jit
def gated_kernel(gate_up, out, row_stride, INNER: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, EARLY: tl.constexpr):
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < INNER
    gate = tl.load(gate_up + row * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + INNER + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * INNER + columns, gated_activation(gate, up, GELU).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def gated_fp8_kernel(
    gate_up, quantised, scales, num_rows, row_stride,
    INNER: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, GELU: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < INNER)[None, :]
    gate_ptrs = gate_up + rows[:, None] * row_stride + columns[None, :]
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + INNER, mask=mask, other=0.0).to(tl.float32)
    store_e4m3_rows(gated_activation(gate, up, GELU), quantised, scales, rows, columns, mask, INNER, num_rows)


def silu_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """gate / (1 + e^-gate) · up: gate_up: [T, 2·inner] (gates first), rows need not be contiguous → [T, inner]

    Source: arXiv 2002.05202. Reads 2 · T · inner elements of fp32, fp16 or bf16 and writes T · inner; 6 operations each, in
    float32, rounded once. Columns beyond `inner` are masked.
    """
    return _launch(gate_up, out, gelu=False)


def gelu_tanh_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """gate · ½ (1 + tanh(√(2/π) (gate + 0.044715 gate³))) · up; else as `silu_mul`

    Source: arXiv 1606.08415, section 2. 10 operations an element.
    """
    return _launch(gate_up, out, gelu=True)


def silu_mul_fp8(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`silu_mul` as e4m3 [T, inner] with row scales [T, 1] float32, quantised before any other rounding.

    One program holds a whole row, because the scale depends on all of it. Writes one byte per element and 4 per row.
    """
    return _launch_fp8(gate_up, gelu=False)


def gelu_tanh_mul_fp8(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`gelu_tanh_mul` as e4m3 rows, as in `silu_mul_fp8`."""
    return _launch_fp8(gate_up, gelu=True)


def _launch(gate_up: torch.Tensor, out: torch.Tensor | None, *, gelu: bool) -> torch.Tensor:
    num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    result = torch.empty(num_rows, inner, dtype=gate_up.dtype, device=gate_up.device) if out is None else out
    tile = column_tile(num_rows, inner)
    if num_rows:
        grid = (num_rows, triton.cdiv(inner, tile.block))
        gated_kernel[grid](
            gate_up, result, gate_up.stride(0), inner, tile.block, gelu,
            num_warps=tile.num_warps, **early_launch(gate_up.device, num_rows),
        )  # fmt: skip
    return result


def _launch_fp8(gate_up: torch.Tensor, *, gelu: bool) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    quantised, scales = allocate_fp8_rows(num_rows, inner, gate_up.device)
    tile = row_tile(inner)
    if num_rows:
        gated_fp8_kernel[(triton.cdiv(num_rows, tile.rows),)](
            gate_up, quantised, scales, num_rows, gate_up.stride(0),
            inner, tile.block, tile.rows, gelu, num_warps=tile.num_warps, **early_launch(gate_up.device, num_rows),
        )  # fmt: skip
    return quantised, scales
