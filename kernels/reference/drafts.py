"""Rejection sampling of drafts, request by request and token by token."""

from __future__ import annotations

import torch

from kernels import gumbel
from kernels.gumbel import ACCEPT, NO_TOKEN, RESIDUAL


def reject_drafts(
    target: torch.Tensor,
    draft: torch.Tensor,
    draft_tokens: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    streams: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """As `kernels.triton.sampling.drafts.reject_drafts`."""
    out = torch.full((len(draft_tokens), draft_tokens.shape[1] + 1), NO_TOKEN, dtype=torch.int64, device=target.device)
    for i, count in enumerate(num_draft_tokens.tolist()):
        num_accepted, residual = 0, None
        while num_accepted < count and residual is None:
            token, position = int(draft_tokens[i, num_accepted]), positions[i : i + 1] + num_accepted
            uniform = float(gumbel.uniform(gumbel.keys(streams[i : i + 1], position, ACCEPT)))
            if uniform * float(draft[i, num_accepted, token]) < float(target[i, num_accepted, token]):
                out[i, num_accepted] = token
                num_accepted += 1
            else:
                residual = (target[i, num_accepted] - draft[i, num_accepted]).clamp(min=0)
        keys = gumbel.keys(streams[i : i + 1], positions[i : i + 1] + num_accepted, 0 if residual is None else RESIDUAL)
        weights = target[i, num_accepted] if residual is None else residual
        drawn = draw_weighted(weights, keys)
        out[i, num_accepted] = drawn if drawn != NO_TOKEN else draw_weighted(target[i, num_accepted], keys)
    return out


def draw_weighted(weights: torch.Tensor, key: torch.Tensor) -> int:
    """The token with the largest weight / E, the lowest id on ties; NO_TOKEN if the weights have no usable sum.

    weights: [V] float32 ≥ 0, in proportion to the probabilities; key: [1] int64
    """
    ids = torch.arange(len(weights), device=weights.device)
    score = weights / gumbel.exponential(gumbel.bits(key, ids[None]))[0]
    largest = score.max()
    if not weights.sum().isfinite() or not largest > 0:
        return NO_TOKEN
    return int((score == largest).nonzero()[0])
