"""Muon (Jordan et al., 2024): momentum is orthogonalised before it is applied; for hidden matrices only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# The quintic Newton-Schulz coefficients of the Muon report: steep at zero, so that five steps suffice.
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalised(matrix: Tensor, steps: int = 5) -> Tensor:
    """matrix: [R, C]. Returns a matrix of that shape with nearly all singular values near one, computed in bf16."""
    x: Tensor = matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.t() if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.t()
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    result = x.t() if tall else x
    return result.to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Groups of matrices; `heights` of a group says where its matrices, which are fused projections, are cut into parts."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, momentum: float = 0.95, decay: float = 0.1) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "decay": decay, "heights": None})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every matrix from its gradient. Closures are not supported."""
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            for weight in group["params"]:
                self._update(weight, group)

    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weight)
        gradient = weight.grad
        if gradient is None:
            raise ValueError("a matrix has no gradient")
        averaged = state["momentum"].lerp_(gradient, 1 - group["momentum"])
        nesterov = gradient.lerp(averaged, group["momentum"])
        weight.mul_(1 - group["lr"] * group["decay"])
        heights = group["heights"] or [weight.shape[0]]
        for block, update in zip(torch.split(weight, heights), torch.split(nesterov, heights), strict=True):
            scale = max(1.0, block.shape[0] / block.shape[1]) ** 0.5
            block.add_(orthogonalised(update), alpha=-group["lr"] * scale)
