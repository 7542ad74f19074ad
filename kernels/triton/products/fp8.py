"""Products with e4m3 weights: of e4m3 rows by the card's fp8 instructions, or of float rows (weight-only quantisation)."""

from __future__ import annotations

import torch

from kernels.quantised_weights import FP8, Fp8Weight
from kernels.triton.launching.card_properties import capability, card
from kernels.triton.products.int8 import multiply_bytes
from kernels.triton.products.tiles import MEMORY_BOUND_ROWS_MAX


def linear_fp8(
    x: torch.Tensor,
    weight: Fp8Weight,
    *,
    x_scales: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[m, n] = x_scales[m] · scales[n] · Σ_k x[m, k] · values[n, k] + bias[n]; x: [M, K] → [M, N]

    x is e4m3 with scales [M, 1] or [1] float32, or float without. The result has x's type, or `out_dtype`, which e4m3 rows
    must name (arXiv 2209.05433). Hopper's instruction adds e4m3 products with about 14 bits: its sums are carried into float32
    registers after every tile of columns (two-level accumulation, arXiv 2412.19437). More than 64 e4m3 rows go to
    `torch._scaled_mm` where it supports them (bfloat16 out, sizes divisible by 16), also with exact accumulation, and a bias is
    added to its result. Float rows are multiplied in their own type, which holds every e4m3 exactly: up to 16 of 16 bits on
    Hopper by `fused_byte_rows`; more than 512 of 16 bits, if the result has their type, with slabs (`dequantised_slabs`), to
    which scaled weights are rounded once.
    Reads N·K bytes of weights once per row tile, or once and 2·N·K of slabs, M·K (e4m3) or 2·M·K of x, writes 2·M·N; 2·M·N·K
    operations. Rows beyond M, columns beyond N and K are masked. Accumulates in float32. Raises ValueError on a card that
    has no e4m3.
    """
    check_fp8(x.device)
    if (x.dtype is FP8) != (x_scales is not None):
        raise ValueError(f"x of {x.dtype} {'without' if x_scales is None else 'with'} scales")
    dtype = out.dtype if out is not None else out_dtype or x.dtype
    if dtype is FP8:
        raise ValueError("the product of e4m3 rows needs a type of its own: give out_dtype or out")
    if x_scales is not None and x.shape[0] > MEMORY_BOUND_ROWS_MAX and _fits_scaled_mm(x, weight, dtype):
        return _scaled_mm(x, weight, x_scales, bias, out)
    out = torch.empty(x.shape[0], weight.values.shape[0], dtype=dtype, device=x.device) if out is None else out
    return multiply_bytes(x, weight, bias, out, x_scales)


def check_fp8(device: torch.device) -> None:
    """Raises ValueError on a card that cannot compute with e4m3; 8-bit weights are served as int8 there."""
    compute_capability = capability(device)
    if not card(compute_capability).has_fp8:
        version = f"{compute_capability // 10}.{compute_capability % 10}"
        raise ValueError(f"fp8 weights need a card of compute capability 8.9 or newer, this one has {version}: use int8")


def _fits_scaled_mm(x: torch.Tensor, weight: Fp8Weight, dtype: torch.dtype) -> bool:
    sizes = (*weight.values.shape, x.stride(0))
    return x.device.type == "cuda" and dtype is torch.bfloat16 and not any(size % 16 for size in sizes)


def _scaled_mm(
    x: torch.Tensor, weight: Fp8Weight, x_scales: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """Multiplies with `torch._scaled_mm`, which for weights with a scale per row needs one per row of x, too."""
    scales = x_scales.reshape(-1, 1).expand(x.shape[0], 1).contiguous(), weight.scales.unsqueeze(0)
    product = torch._scaled_mm(x, weight.values.T, *scales, out_dtype=torch.bfloat16, use_fast_accum=False, out=out)
    return product if bias is None else product.add_(bias)
