"""Weights of a product that other operations may read as well: a packed product of this kind may be fused."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch.nn import functional


@runtime_checkable
class ReadsWeight(Protocol):
    """A product that reads its weight as it was packed: a tensor, `Int8Weight`, `Fp8Weight` or `Int4Weight`; None where it
    keeps a form of its own."""

    weight: Any
    bias: torch.Tensor | None


def plain_product(product: object) -> PlainWeights | None:
    """The product of rows as they are, where other operations may read its weights too."""
    unrounded = getattr(product, "unrounded", product)
    return unrounded if isinstance(unrounded, PlainWeights) else None


class PlainWeights:
    """weight: [out, in], bias: [out]"""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, in] → [T, out]"""
        return functional.linear(x, self.weight, self.bias)
