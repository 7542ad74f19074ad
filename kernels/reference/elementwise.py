"""Normalisation, rotation and activations as in their papers, in float32."""

from __future__ import annotations

import math

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS normalisation. x: [..., hidden], weight: [hidden] → x / rms(x) · weight (arXiv 1910.07467, eq. 4)"""
    wide = x.float()
    rms = (wide.pow(2).sum(dim=-1, keepdim=True) / wide.shape[-1] + eps).sqrt()
    return (wide / rms * weight.float()).to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Layer normalisation.

    x: [..., hidden], weight and bias: [hidden] → (x - mean) / deviation · weight + bias (arXiv 1607.06450, eq. 4)
    """
    wide = x.float()
    centred = wide - wide.mean(dim=-1, keepdim=True)
    deviation = (centred.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt()
    return (centred / deviation * weight.float() + bias.float()).to(x.dtype)


def rope(qk: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> None:
    """Rotary embedding, in place.

    qk: [T, heads, D], cos and signed_sin: [T, 1, D]; rotates pairs (i, i + D/2) (arXiv 2104.09864, eq. 34)
    """
    half = qk.shape[-1] // 2
    for token in range(qk.shape[0]):
        for head in range(qk.shape[1]):
            first, second = qk[token, head, :half].float().clone(), qk[token, head, half:].float().clone()
            c, s = cos[token, 0, :half].float(), signed_sin[token, 0, half:].float()
            qk[token, head, :half] = (first * c - second * s).to(qk.dtype)
            qk[token, head, half:] = (second * c + first * s).to(qk.dtype)


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
