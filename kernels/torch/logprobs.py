"""Log-probabilities of a few tokens of each row, in torch, without a table of all of them."""

from __future__ import annotations

import torch


def token_logprobs(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.triton.sampling.logprobs.token_logprobs`."""
    values = logits.float()
    chosen = values.gather(1, ids.clamp_min(0).long())
    ranks = (values > torch.where(ids[:, :1] >= 0, chosen[:, :1], torch.inf)).sum(dim=-1) + 1
    return torch.where(ids >= 0, chosen - values.logsumexp(dim=-1, keepdim=True), torch.nan), ranks.int()
