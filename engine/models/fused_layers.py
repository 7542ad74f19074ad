"""A decode step of few rows with every norm fused into a product: six launches for a layer instead of nine, five for one
request.

The residual stream goes from product to product as `ops.Stream`: its rows, already times the weight of the coming norm, and the
squares from which the next product takes the root. Only for layers that are normalised before attention and before the
feed-forward part, and whose products can multiply rows as they are.

A row of float16 that is multiplied before it is divided may overflow. There a norm's weight is divided by a power of two that
leaves none above one, so that a row times it is finite wherever the row is, and the next product is multiplied by that power.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.layers.attention import Attention
from engine.layers.experts import SparseMLP
from engine.layers.forward_inputs import ForwardInputs
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from kernels import ops


@dataclass(frozen=True, slots=True)
class FusedNorm:
    """A norm whose division is done by the product after it. weight: [hidden], `factor` times less than the norm's."""

    norm: RMSNorm
    weight: torch.Tensor
    factor: float

    @classmethod
    def of(cls, norm: RMSNorm, dtype: torch.dtype) -> FusedNorm:
        """`norm` for rows of `dtype`. In float16 its weight is divided by a power of two, so that no product overflows."""
        if dtype is not torch.float16:
            return cls(norm, norm.weight, 1.0)
        exponent = int(torch.frexp(norm.weight.float().abs().amax()).exponent)
        factor = 2.0 ** max(exponent, 0)
        return cls(norm, norm.weight / factor, factor)


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """The parts of a layer by what is fused. `norms`: before attention and before the feed-forward part."""

    attention: Attention
    qkv: ops.FusibleProduct
    out: ops.FusibleProduct
    gate_up: ops.FusibleProduct
    down: ops.FusibleProduct
    gate: str
    norms: tuple[FusedNorm, FusedNorm]

    @classmethod
    def of(
        cls, attention: Attention, mlp: GatedMLP | SparseMLP, norms: Sequence[RMSNorm | None], dtype: torch.dtype
    ) -> FusedLayer | None:
        """The fused layer, None if its parts cannot be fused. `norms`: before and after attention, before and after `mlp`."""
        before_attention, after_attention, before_mlp, after_mlp = norms
        if isinstance(mlp, SparseMLP) or after_attention is not None or after_mlp is not None:
            return None
        (qkv, out), (gate_up, down) = attention.fusible_products, mlp.fusible_products
        if before_attention is None or before_mlp is None or qkv is None or out is None or gate_up is None or down is None:
            return None
        fused_norms = FusedNorm.of(before_attention, dtype), FusedNorm.of(before_mlp, dtype)
        return cls(attention, qkv, out, gate_up, down, mlp.gate, fused_norms)


class FusedLayers:
    """All layers of a decoder, for at most FUSED_ROWS_MAX rows."""

    def __init__(
        self,
        layers: Sequence[FusedLayer],
        linear_add: Callable[..., ops.Stream],
        normed_linear: Callable[..., torch.Tensor],
        *,
        multiplier: float,
        eps: float,
    ) -> None:
        """`multiplier` is that of every branch before it is added to the residual stream."""
        self._layers = layers
        self._linear_add, self._normed_linear = linear_add, normed_linear
        self._multiplier, self._eps = multiplier, eps

    def __call__(
        self, residual: torch.Tensor, inputs: ForwardInputs, kv_caches: Sequence[torch.Tensor], last_norm: RMSNorm
    ) -> torch.Tensor:
        """residual: [T, hidden], the embeddings → [T, hidden], the stream after the last layer; `last_norm` comes next"""
        stream: ops.Stream | None = None
        next_norms = [layer.norms[0] for layer in self._layers[1:]] + [FusedNorm(last_norm, last_norm.weight, 1.0)]
        for layer, kv_cache, next_norm in zip(self._layers, kv_caches, next_norms, strict=True):
            if stream is None:
                qkv = layer.qkv(layer.norms[0].norm(residual))
            else:
                qkv, residual = self._product(stream, layer.qkv, layer.norms[0]), stream.total
            attended = layer.attention.attend(qkv, inputs, kv_cache)
            stream = self._add(attended, layer.out, residual, layer.norms[1])
            gated = self._product(stream, layer.gate_up, layer.norms[1], gate=layer.gate)
            stream = self._add(gated, layer.down, stream.total, next_norm)
        assert stream is not None, "a decoder has layers"
        return stream.total

    def _product(
        self, stream: ops.Stream, product: ops.FusibleProduct, norm: FusedNorm, *, gate: str | None = None
    ) -> torch.Tensor:
        return self._normed_linear(stream, product.weight, self._eps, bias=product.bias, gate=gate, factor=norm.factor)

    def _add(self, x: torch.Tensor, product: ops.FusibleProduct, residual: torch.Tensor, norm: FusedNorm) -> ops.Stream:
        return self._linear_add(x, product.weight, residual, norm.weight, alpha=self._multiplier, bias=product.bias)
