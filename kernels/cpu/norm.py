"""RMS normalisation with the residual sum before it."""

from __future__ import annotations

import torch

from kernels.cpu.elementwise import rms_norm


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    alpha: float = 1.0,
    branch_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual sum and its RMS normalisation.

    x, residual: [..., hidden] → rms_norm(sum) · weight and sum = residual + alpha · x, both [..., hidden] in x's dtype.

    With `branch_weight`, x itself is normalised before it is added. Without `weight` the first result is the sum too.
    """
    branch = x if branch_weight is None else rms_norm(x, branch_weight, eps)
    # Without a multiplier, the sum of one row costs a quarter less.
    total = residual + branch if alpha == 1.0 else torch.add(residual, branch, alpha=alpha)
    return (total if weight is None else rms_norm(total, weight, eps)), total
