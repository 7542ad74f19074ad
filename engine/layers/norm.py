"""RMS normalisation with its weight (arXiv 1910.07467), and layer normalisation (arXiv 1607.06450)."""

from __future__ import annotations

import torch

from engine.runner.weights import WeightPlan
from kernels import ops


class RMSNorm:
    """Normalises the last dimension, `size` wide. With `offset` the checkpoint stores weight - 1 (Gemma).

    Such a weight is kept in float32: one plus a small number would lose most of it in 16 bits.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device, offset: bool = False) -> None:
        self.weight = torch.empty(size, dtype=torch.float32 if offset else dtype, device=device)
        self.eps = eps
        self._offset = offset
        self._ops = ops.operations(device, dtype)

    def plan(self, plan: WeightPlan, name: str) -> None:
        plan.add(f"{name}.weight", self.weight)

    def pack(self) -> None:
        """Make the loaded weight ready; once."""
        if self._offset:
            self.weight += 1.0
            self._offset = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(x, self.weight, self.eps)


class LayerNorm:
    """Normalises the last dimension, `size` wide, with weight and bias."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.bias = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def plan(self, plan: WeightPlan, name: str) -> None:
        plan.add(f"{name}.weight", self.weight)
        plan.add(f"{name}.bias", self.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)
