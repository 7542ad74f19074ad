"""Activations, gated and not, and gated ones whose result is quantised, in float32."""

from __future__ import annotations

import math

import torch

from kernels.reference.fp8_rows import quantize_rows_fp8


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU gate. gate_up: [T, 2·inner] → silu(gate) · up: [T, inner]"""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x · Φ(x), Φ the normal distribution function (arXiv 1606.08415, section 2)"""
    wide = x.float()
    return (wide * 0.5 * (1 + torch.erf(wide / math.sqrt(2)))).to(x.dtype)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """The approximation of the same section: 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))"""
    wide = x.float()
    return (0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))).to(x.dtype)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """GELU gate. gate_up: [T, 2·inner] → gelu(gate) · up: [T, inner]"""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gelu_tanh(gate) * up).to(gate_up.dtype)


def silu_mul_fp8(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """SiLU gate, quantised. gate_up: [T, 2·inner] → silu(gate) · up: e4m3 [T, inner] and row scales [T, 1] float32"""
    return quantize_rows_fp8(silu_mul(gate_up.float()))


def gelu_tanh_mul_fp8(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """GELU gate, quantised.

    gate_up: [T, 2·inner] → gelu(gate) · up by the tanh approximation: e4m3 [T, inner] and row scales [T, 1] float32
    """
    return quantize_rows_fp8(gelu_tanh_mul(gate_up.float()))
