"""Products of a decode step with their epilogues, in float32: one adds the residual and sums the squares, the other divides by
the norm and applies the gated activation."""

from __future__ import annotations

import torch

from kernels.quantised_weights import Weight
from kernels.reference.activation import gelu_tanh_mul, silu_mul
from kernels.reference.quantised import dequantise
from kernels.residual_stream import Gate, Stream


def linear_add(
    x: torch.Tensor,
    weight: Weight,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    alpha: float = 1.0,
    bias: torch.Tensor | None = None,
) -> Stream:
    """Product, residual sum and the sums of its squares.

    x: [M, K], weight: [d, K], residual: [M, d], norm_weight: [d], bias: [d] → residual + alpha · (x Wᵀ + bias)
    """
    product = x.float() @ dequantise(weight).T + (0.0 if bias is None else bias.float())
    total = (residual.float() + alpha * product).to(x.dtype)
    weighted = (total.float() * norm_weight.float()).to(x.dtype)
    return Stream(total, weighted, total.float().square().sum(dim=-1)[None])


def normed_linear(
    stream: Stream,
    weight: Weight,
    eps: float,
    *,
    bias: torch.Tensor | None = None,
    gate: Gate | None = None,
    factor: float = 1.0,
) -> torch.Tensor:
    """Product of the normalised stream, with the gate.

    weight: [N, d] → rms_norm(total) Wᵀ + bias: [M, N]; with `gate`, N = 2·inner, act(first half) · second: [M, inner]

    `weighted` has been divided by `factor`.
    """
    width = stream.weighted.shape[1]
    inverse_rms = torch.rsqrt(stream.squares.sum(dim=0) / width + eps)
    product = factor * inverse_rms[:, None] * (stream.weighted.float() @ dequantise(weight).T)
    product = product + (0.0 if bias is None else bias.float())
    if gate is not None:
        product = silu_mul(product) if gate == "silu" else gelu_tanh_mul(product)
    return product.to(stream.weighted.dtype)
