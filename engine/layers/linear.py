"""Matrix products with weights, several of the checkpoint's matrices fused into one where they share their input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from engine.weights import WeightPlan


class FusedLinear:
    """y = x Wᵀ + b, where W stacks the matrices `parts` = [(checkpoint name, rows), …]."""

    def __init__(
        self, parts: Sequence[tuple[str, int]], columns: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._parts = parts
        rows = sum(size for _, size in parts)
        self.weight = torch.empty(rows, columns, dtype=dtype, device=device)
        self.bias = torch.empty(rows, dtype=dtype, device=device) if bias else None

    def plan(self, plan: WeightPlan, prefix: str) -> None:
        """Each part of the checkpoint goes to its rows here."""
        start = 0
        for name, size in self._parts:
            plan.add(f"{prefix}.{name}.weight", self.weight.narrow(0, start, size))
            if self.bias is not None:
                plan.add(f"{prefix}.{name}.bias", self.bias.narrow(0, start, size))
            start += size

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)
