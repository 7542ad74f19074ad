"""Log-probabilities of a few tokens from a whole table of them, in float64."""

from __future__ import annotations

import math

import torch


def token_logprobs(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.triton.sampling.logprobs.token_logprobs`."""
    table = torch.log_softmax(logits.double(), dim=-1)
    chosen = torch.where(ids >= 0, table.gather(1, ids.clamp(min=0).long()), math.nan)
    target = logits.gather(1, ids[:, :1].clamp(min=0).long())
    ranks = torch.where(ids[:, 0] >= 0, (logits > target).sum(dim=-1) + 1, 1)
    return chosen.float(), ranks.int()
