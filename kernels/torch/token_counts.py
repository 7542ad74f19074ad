"""Token counts for the penalties, in torch."""

from __future__ import annotations

import torch


def count_tokens(slots: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor) -> None:
    """As `kernels.triton.sampling.token_counts.count_tokens`."""
    counted = (slots >= 0) & (tokens >= 0)
    indices = slots[counted].long(), tokens[counted].long()
    counts[indices] = (counts[indices] | 1) + 2
