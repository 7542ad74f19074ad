"""Products that expose their weights, so that other operations may read them and be fused with the product."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch.nn import functional


@runtime_checkable
class ReadsWeight(Protocol):
    """A product that exposes its packed weight: a tensor, `Int8Weight`, `Fp8Weight` or `Int4Weight`; None if it keeps another
    form."""

    weight: Any
    bias: torch.Tensor | None


def plain_product(product: object) -> PlainWeights | None:
    """The product of unquantised rows; None if other operations cannot read its weights."""
    unrounded = getattr(product, "unrounded", product)
    return unrounded if isinstance(unrounded, PlainWeights) else None


class PlainWeights:
    """A product x Wᵀ + bias whose weights other operations read too. weight: [out, in], bias: [out]"""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, in] → [T, out]"""
        return functional.linear(x, self.weight, self.bias)
