"""Rows in e4m3 (arXiv 2209.05433), each with the scale at which its largest element just fits."""

from __future__ import annotations

import torch

from kernels.quantised_weights import FP8, FP8_MAX

ROW_MAX_MIN = 1e-12
"""The least magnitude that determines a scale: rows of smaller numbers are scaled as if this were their largest."""


def quantize_rows_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in e4m3, each with its scale. x: [T, hidden] → e4m3 [T, hidden] and scales [T, 1] float32; x ≈ e4m3 · scale"""
    wide = x.float()
    absmax = wide.abs().amax(dim=-1, keepdim=True).clamp_min_(ROW_MAX_MIN)
    return to_fp8(wide * (FP8_MAX / absmax)), absmax / FP8_MAX


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Nearest e4m3 value; anything beyond the largest becomes the largest (torch alone would make it NaN)."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)
