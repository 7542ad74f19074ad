"""Rows of the embedding by token, of cosines and sines by position, one at a time."""

from __future__ import annotations

import torch


def embed(token_ids: torch.Tensor, table: torch.Tensor, *, multiplier: float = 1.0) -> torch.Tensor:
    """Rows of the embedding. token_ids: [T] int64 or int32, table: [V, hidden] → [T, hidden] · multiplier"""
    return torch.stack([(table[token].float() * multiplier).to(table.dtype) for token in token_ids.tolist()])


def rotation_rows(cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines by position.

    cos, sin: [max_len, 1, rotary_dim], positions: [T] → both at these positions, [T, 1, rotary_dim]
    """
    return torch.stack([cos[at] for at in positions.tolist()]), torch.stack([sin[at] for at in positions.tolist()])
