"""Counts of generated tokens, one by one."""

from __future__ import annotations

import torch


def count_tokens(slots: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor) -> None:
    """As `kernels.triton.sampling.token_counts.count_tokens`."""
    for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
        if slot >= 0 and token >= 0:
            counts[slot, token] = (counts[slot, token] | 1) + 2
