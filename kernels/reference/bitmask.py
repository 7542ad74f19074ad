"""A grammar's mask applied to logits, bit by bit."""

from __future__ import annotations

import math

import torch


def apply_bitmask(logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor) -> None:
    """As `kernels.triton.sampling.bitmask.apply_bitmask`."""
    for mask, row in zip(masks, rows.tolist(), strict=True):
        for token in range(logits.shape[1] if row >= 0 else 0):
            if not (int(mask[token // 32]) >> (token % 32)) & 1:
                is_bad = bool(logits[row, token].isnan()) or logits[row, token] == math.inf
                logits[row, token] = math.nan if is_bad else -math.inf
