"""Rows of the embedding by token, of cosines and sines by position."""

from __future__ import annotations

import torch
from torch.nn import functional


def embed(token_ids: torch.Tensor, table: torch.Tensor, *, multiplier: float = 1.0) -> torch.Tensor:
    """Rows of the embedding. token_ids: [T] int64 or int32, table: [V, hidden] → [T, hidden] · multiplier"""
    rows = functional.embedding(token_ids, table)
    return rows if multiplier == 1.0 else rows * multiplier


def rotation_rows(cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines by position.

    cos, sin: [max_len, 1, rotary_dim], positions: [T] → both at these positions, [T, 1, rotary_dim]
    """
    return cos.index_select(0, positions), sin.index_select(0, positions)
