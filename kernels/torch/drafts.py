"""Rejection sampling of drafts in torch, for all requests at once."""

from __future__ import annotations

import torch

from kernels import gumbel
from kernels.gumbel import ACCEPT, NO_TOKEN, RESIDUAL
from kernels.torch.sampling import draw_weighted


def reject_drafts(
    target: torch.Tensor,
    draft: torch.Tensor,
    draft_tokens: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    streams: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """As `kernels.triton.sampling.drafts.reject_drafts`."""
    depth, index = draft_tokens.shape[1], torch.arange(draft_tokens.shape[1], device=draft_tokens.device)
    keys = gumbel.keys(streams[:, None], positions[:, None] + index, ACCEPT)
    draft_probs, target_probs = (table[:, :depth].gather(2, draft_tokens[..., None])[..., 0] for table in (draft, target))
    accepts = (gumbel.uniform(keys) * draft_probs < target_probs) & (index < num_draft_tokens[:, None])
    num_accepted = accepts.int().cumprod(dim=1).sum(dim=1)
    is_rejected = num_accepted < num_draft_tokens
    rows = torch.arange(len(draft_tokens), device=draft_tokens.device)
    target_rows = target[rows, num_accepted]
    residual = torch.where(
        is_rejected[:, None], (target_rows - draft[rows, num_accepted.clamp_max(depth - 1)]).clamp_min(0), target_rows
    )
    last = positions + num_accepted
    keys = torch.where(is_rejected, gumbel.keys(streams, last, RESIDUAL), gumbel.keys(streams, last))
    drawn = draw_weighted(residual, keys)
    drawn = torch.where(drawn == NO_TOKEN, draw_weighted(target_rows, keys), drawn)
    out = torch.where(index < num_accepted[:, None], draft_tokens, NO_TOKEN)
    return torch.nn.functional.pad(out, (0, 1), value=NO_TOKEN).scatter_(1, num_accepted[:, None], drawn[:, None])
