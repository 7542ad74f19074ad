"""Layer and RMS normalisation, the latter after a residual sum or quantised, following the formulas in float32."""

from __future__ import annotations

import torch

from kernels.reference.fp8_rows import quantize_rows_fp8


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS normalisation. x: [..., hidden], weight: [hidden] → x / rms(x) · weight (arXiv 1910.07467, eq. 4)"""
    wide = x.float()
    rms = (wide.pow(2).sum(dim=-1, keepdim=True) / wide.shape[-1] + eps).sqrt()
    return (wide / rms * weight.float()).to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Layer normalisation.

    x: [..., hidden], weight and bias: [hidden] → (x - mean) / deviation · weight + bias (arXiv 1607.06450, eq. 4)
    """
    wide = x.float()
    centred = wide - wide.mean(dim=-1, keepdim=True)
    deviation = (centred.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt()
    return (centred / deviation * weight.float() + bias.float()).to(x.dtype)


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

    x, residual: [..., hidden] → rms_norm(sum) · weight and sum = residual + alpha · x; the sum is rounded to x's dtype.

    With `branch_weight`, x itself is normalised before it is added. Without `weight` the first result is the sum too.
    """
    branch = x.float() if branch_weight is None else rms_norm(x.float(), branch_weight, eps)
    total = (residual.float() + alpha * branch).to(x.dtype)
    return (total if weight is None else rms_norm(total, weight, eps)), total


def rms_norm_fp8(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS normalisation, quantised. x: [T, hidden] → e4m3 [T, hidden] and its row scales [T, 1] float32"""
    return quantize_rows_fp8(rms_norm(x.float(), weight, eps))


def add_rms_norm_fp8(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    alpha: float = 1.0,
    branch_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `add_rms_norm` → e4m3 [T, hidden], row scales [T, 1] float32, sum [T, hidden] in x's dtype"""
    _, total = add_rms_norm(x, residual, None, eps, alpha=alpha, branch_weight=branch_weight)
    return *rms_norm_fp8(total, weight, eps), total
