"""Rows in e4m3, each with its own scale: the nearest finite e4m3 value (arXiv 2209.05433, table 1), found by search."""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def quantize_rows_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in e4m3, each with its scale.

    x: [T, hidden] → e4m3 [T, hidden] and scales [T, 1] float32; x ≈ e4m3 · scale, the largest of a row becomes 448
    """
    wide = x.float()
    absmax = wide.abs().max(dim=-1, keepdim=True).values.clamp(min=1e-12)
    return to_fp8(wide * (FP8_MAX / absmax)), absmax / FP8_MAX


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """The nearest e4m3 values.

    x: any shape, float32 → the nearest e4m3 values, on ties the one whose last bit is 0; bounded by ±448
    """
    bits = torch.arange(256, dtype=torch.uint8, device=x.device)
    values = bits.view(FP8).float()
    positive, order = values[:127].sort()
    magnitude = x.abs().clamp(max=FP8_MAX).reshape(-1)
    above = torch.searchsorted(positive, magnitude).clamp(max=126)
    below = (above - 1).clamp(min=0)
    to_above, to_below = positive[above] - magnitude, magnitude - positive[below]
    takes_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    codes = torch.where(takes_above, order[above], order[below]).to(torch.uint8)
    signs = torch.signbit(x).reshape(-1).to(torch.uint8) * 128
    return (codes + signs).view(FP8).reshape(x.shape)
