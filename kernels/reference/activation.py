"""Gated activations whose result is quantised, in float32."""

from __future__ import annotations

import torch

from kernels.reference.elementwise import gelu_tanh_mul, silu_mul
from kernels.reference.fp8_rows import quantize_rows_fp8


def silu_mul_fp8(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """SiLU gate, quantised. gate_up: [T, 2·inner] → silu(gate) · up: e4m3 [T, inner] and row scales [T, 1] float32"""
    return quantize_rows_fp8(silu_mul(gate_up.float()))


def gelu_tanh_mul_fp8(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """GELU gate, quantised.

    gate_up: [T, 2·inner] → gelu(gate) · up by the tanh approximation: e4m3 [T, inner] and row scales [T, 1] float32
    """
    return quantize_rows_fp8(gelu_tanh_mul(gate_up.float()))
