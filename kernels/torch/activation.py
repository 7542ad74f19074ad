"""Activations of feed-forward layers, gated and not, each by one or two torch operations."""

from __future__ import annotations

import torch
from torch.nn import functional


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU gate. gate_up: [T, 2·inner] → silu(gate) · up: [T, inner]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """GELU gate. gate_up: [T, 2·inner] → gelu(gate) · up: [T, inner], gelu by its tanh approximation"""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x · Φ(x) with the error function (arXiv 1606.08415)"""
    return functional.gelu(x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """x · Φ(x) by its tanh approximation"""
    return functional.gelu(x, approximate="tanh")
