"""RMS normalisation, alone or with the residual sum before it, and layer normalisation, in as few operations as possible."""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS normalisation.

    x: [..., hidden], weight: [hidden] → [..., hidden]; the mean of squares is taken in float32 or wider.

    A weight in float32 beside narrower x is multiplied in float32.
    """
    if weight.dtype is not x.dtype:
        return functional.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return functional.rms_norm(x, weight.shape, weight, eps)


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


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Layer normalisation. x: [..., hidden], weight and bias: [hidden] → [..., hidden]"""
    return functional.layer_norm(x, weight.shape, weight, bias, eps)
