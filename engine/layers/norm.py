"""RMS normalisation with its weight (arXiv 1910.07467)."""

from __future__ import annotations

import torch

from engine.weights import WeightPlan
from kernels import ops


class RMSNorm:
    """Normalises the last dimension, `size` wide."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def plan(self, plan: WeightPlan, name: str) -> None:
        plan.add(f"{name}.weight", self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self.eps)
