"""Products that expose their weights, so that other operations may read them and be fused with the product."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class HasWeight(Protocol):
    """A product that exposes its packed weight: a tensor, `Int8Weight`, `Fp8Weight` or `Int4Weight`; None if it keeps another
    form."""

    weight: Any
    bias: torch.Tensor | None


class FusibleProduct(ABC):
    """A product x Wᵀ + bias of unquantised rows, which other operations compute too, fused with their own work, from the same
    weight and bias. weight: [out, in], a tensor or one of the forms of `quantised_weights`; bias: [out]"""

    def __init__(self, weight: Any, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, in] → [T, out]"""


def fusible_form(product: object) -> FusibleProduct | None:
    """The product of unquantised rows with the same weight; None if other operations cannot read that."""
    unrounded = getattr(product, "unrounded", product)
    return unrounded if isinstance(unrounded, FusibleProduct) else None
