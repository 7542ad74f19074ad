"""RMS normalisation, optionally after a residual sum and with quantised results, in one pass over memory.

One program processes one wide row or several narrow ones. A single row is not divided among multiprocessors: loading its 8 KB
takes little more than the memory latency, and a second program would have to wait for the first one's sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.launching.early_launch import early_launch, wait_for_previous
from kernels.triton.rows.fp8 import allocate_fp8_rows, store_e4m3_rows
from kernels.triton.rows.tiles import row_tile


@triton.jit
def _normed(value, weight, eps, WIDTH: tl.constexpr):
    """value: [ROWS, BLOCK] float32, zero outside, weight: [BLOCK] → value / rms(value) · weight"""
    inverse_rms = tl.rsqrt(tl.sum(value * value, axis=1) / WIDTH + eps)
    return value * inverse_rms[:, None] * weight.to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x, residual, weight, branch_weight, normed, total, scales,
    num_rows, x_stride, residual_stride, normed_stride, eps, alpha,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    total_offsets = rows[:, None] * WIDTH + columns[None, :]
    # All loads are issued before the first use: a single row pays the memory latency once.
    value = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0)
    if residual is not None:
        previous = tl.load(residual + rows[:, None] * residual_stride + columns[None, :], mask=mask, other=0.0)
    if branch_weight is not None:
        branch_scale = tl.load(branch_weight + columns, mask=columns < WIDTH, other=0.0, eviction_policy="evict_last")
    if weight is not None:
        scale = tl.load(weight + columns, mask=columns < WIDTH, other=0.0, eviction_policy="evict_last")
    value = value.to(tl.float32)
    if branch_weight is not None:
        value = _normed(value, branch_scale, eps, WIDTH)
    if residual is not None:
        # The norm is that of the sum as stored (rounded), as with two separate operations.
        stored = (previous.to(tl.float32) + alpha * value).to(total.dtype.element_ty)
        tl.store(total + total_offsets, stored, mask=mask)
        value = stored.to(tl.float32)
    if weight is not None:
        value = _normed(value, scale, eps, WIDTH)
        if scales is None:
            normed_ptrs = normed + rows[:, None] * normed_stride + columns[None, :]
            tl.store(normed_ptrs, value.to(normed.dtype.element_ty), mask=mask)
        else:
            store_e4m3_rows(value, normed, scales, rows, columns, mask, WIDTH, num_rows)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """x / √(mean(x²) + eps) · weight: x: [..., hidden], weight: [hidden] in x's dtype or float32 → [..., hidden]

    Source: arXiv 1910.07467, eq. 4. Reads and writes T · hidden elements of fp32, fp16 or bf16; 4 operations per element; sums
    and products in float32, rounded once. Rows need not be contiguous, neither in x nor in `out`, which may be x itself.
    Columns beyond `hidden` are masked.
    """
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _launch(x, None, weight, None, normed, None, None, eps, 1.0)
    return normed


def rms_norm_fp8(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of x: [T, hidden] as e4m3 [T, hidden] with row scales [T, 1] float32, quantised before any other rounding.

    Writes one byte per element and 4 per row. Scales as in fp8.py.
    """
    quantised, scales = allocate_fp8_rows(x.shape[0], x.shape[1], x.device)
    _launch(x, None, weight, None, quantised, None, scales, eps, 1.0)
    return quantised, scales


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    alpha: float = 1.0,
    branch_weight: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum = residual + alpha · x, and rms_norm(sum) · weight: x, residual: [..., hidden] → both [..., hidden] in x's dtype

    With `branch_weight`, x itself is normalised first (norms on both sides of a branch: arXiv 2408.00118); without `weight` the
    sum is the only result and is returned for the norm too (norms only after the branch: arXiv 2501.00656). Reads 2 and writes
    2 · T · hidden elements; 6 operations per element, in float32. The sum is rounded to x's dtype before it is normalised.
    `out`: (normed, sum); the sum may overwrite `residual`. Columns beyond `hidden` are masked.
    """
    normed, total = (_like(x) if weight is not None else None, _like(x)) if out is None else out
    _launch(x, residual, weight, branch_weight, normed, total, None, eps, alpha)
    return (total if normed is None else normed), total


def add_rms_norm_fp8(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    alpha: float = 1.0,
    branch_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`add_rms_norm` with the norm as e4m3 [T, hidden] and row scales [T, 1] float32, then the sum [T, hidden] in x's dtype."""
    quantised, scales = allocate_fp8_rows(x.shape[0], x.shape[1], x.device)
    total = _like(x)
    _launch(x, residual, weight, branch_weight, quantised, total, scales, eps, alpha)
    return quantised, scales, total


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    branch_weight: torch.Tensor | None,
    normed: torch.Tensor | None,
    total: torch.Tensor | None,
    scales: torch.Tensor | None,
    eps: float,
    alpha: float,
) -> None:
    width = x.shape[-1]
    x_rows = x.view(-1, width)
    residual_rows = None if residual is None else residual.view(-1, width)
    num_rows = x_rows.shape[0]
    if num_rows == 0:
        return
    tile = row_tile(width)
    residual_stride = width if residual_rows is None else residual_rows.stride(0)
    normed_stride = width if normed is None else normed.view(-1, width).stride(0)
    rms_norm_kernel[(triton.cdiv(num_rows, tile.rows),)](
        x_rows, residual_rows, weight, branch_weight, normed, total, scales,
        num_rows, x_rows.stride(0), residual_stride, normed_stride, eps, alpha,
        width, tile.block, tile.rows, num_warps=tile.num_warps, **early_launch(x.device, num_rows),
    )  # fmt: skip
