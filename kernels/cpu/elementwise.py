"""Normalisation, rotation and activations in as few torch operations as possible."""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS normalisation.

    x: [..., hidden], weight: [hidden] → [..., hidden]; the mean of squares is taken in float32 or wider.

    A weight in float32 beside narrower x is multiplied in float32.
    """
    if weight.dtype is not x.dtype:
        return functional.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return functional.rms_norm(x, weight.shape, weight, eps)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Layer normalisation. x: [..., hidden], weight and bias: [hidden] → [..., hidden]"""
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def rope(qk: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> None:
    """Rotary embedding, in place.

    qk: [T, heads, D], cos and signed_sin: [T, 1, D]; rotates pairs (i, i + D/2).

    The first half of `signed_sin` is negative, so that one roll and one fused multiply-add do the rotation.
    """
    swapped = qk.roll(qk.shape[-1] // 2, -1)
    qk.mul_(cos).addcmul_(swapped, signed_sin)


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
