"""Normalisation, rotation and the gated activation in as few torch operations as possible."""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [..., hidden], weight: [hidden] → [..., hidden]; the mean of squares is taken in float32 or wider."""
    return functional.rms_norm(x, weight.shape, weight, eps)


def rope(qk: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> None:
    """qk: [T, heads, D], cos and signed_sin: [T, 1, D]; rotates pairs (i, i + D/2) in place.

    The first half of `signed_sin` is negative, so that one roll and one fused multiply-add do the rotation.
    """
    swapped = qk.roll(qk.shape[-1] // 2, -1)
    qk.mul_(cos).addcmul_(swapped, signed_sin)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [T, 2·inner] → silu(gate) · up: [T, inner]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
