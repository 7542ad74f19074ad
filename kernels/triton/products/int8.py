"""Products with int8 weights, one scale per output: half the bytes of 16-bit weights, converted in registers or in slabs."""

from __future__ import annotations

from functools import partial

import torch

from kernels.quantised_weights import Fp8Weight, Int8Weight
from kernels.triton.launching.card_properties import capability, multiprocessors
from kernels.triton.products.dequantised_slabs import dequantise_rows, multiply_slabs, takes_slabs
from kernels.triton.products.hopper_rows import multiply_few_rows
from kernels.triton.products.tiles import byte_tiles, launch


def linear_int8(
    x: torch.Tensor, weight: Int8Weight, *, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """out[m, n] = scales[n] · Σ_k x[m, k] · values[n, k] + bias[n]; x: [M, K] float → [M, N] like x

    The scale of an output is applied after the sum, so it costs nothing per weight and is exact in float32 (as in arXiv
    2211.10438, weights only). An int8 is exact in float16 and bfloat16, so products are those of the quantised weight. For M ≤
    16 on Hopper, `fused_byte_rows`; up to 64, the lowest tiles that hold M rows, with split-K in a fixed order; up to 512,
    tiles of 128 × 128, which keep the tensor cores busy; above, if x has 16 bits, slabs (`dequantised_slabs`) of x's type, to
    which scaled weights are rounded once. Reads N·K + 4·N bytes of weights once per row tile, or once and 2·N·K of slabs,
    2·M·K of x, writes 2·M·N; 2·M·N·K operations. Rows beyond M, columns beyond N and K are masked. Accumulates in float32.
    """
    out = x.new_empty(x.shape[0], weight.values.shape[0]) if out is None else out
    return multiply_bytes(x, weight, bias, out)


def multiply_bytes(
    x: torch.Tensor,
    weight: Int8Weight | Fp8Weight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    x_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """x Wᵀ + bias for weights of 8 bits, by the kernel for the number of rows of x → out"""
    if not x.shape[0] or multiply_few_rows(x, weight, bias, out):
        return out
    if takes_slabs(x, out):
        return multiply_slabs(x, partial(dequantise_rows, weight), x.shape[1], bias, out)
    tiles = byte_tiles(
        x.shape[0], weight.values.shape, capability(x.device), multiprocessors(x.device), row_bytes=x.element_size()
    )
    return launch(x, weight.values, tiles, out, x_scales=x_scales, weight_scales=weight.scales, bias=bias)
