"""Rejection sampling of drafts, request by request and guess by guess."""

from __future__ import annotations

import torch

from kernels import gumbel
from kernels.gumbel import ACCEPT, NO_TOKEN, RESIDUAL


def reject_drafts(
    target: torch.Tensor,
    draft: torch.Tensor,
    guesses: torch.Tensor,
    num_guesses: torch.Tensor,
    streams: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """As `kernels.triton.drafts.reject_drafts`."""
    out = torch.full((len(guesses), guesses.shape[1] + 1), NO_TOKEN, dtype=torch.int64, device=target.device)
    for i, count in enumerate(num_guesses.tolist()):
        taken, left = 0, None
        while taken < count and left is None:
            guess, position = int(guesses[i, taken]), positions[i : i + 1] + taken
            number = float(gumbel.uniform(gumbel.keys(streams[i : i + 1], position, ACCEPT)))
            if number * float(draft[i, taken, guess]) < float(target[i, taken, guess]):
                out[i, taken] = guess
                taken += 1
            else:
                left = (target[i, taken] - draft[i, taken]).clamp(min=0)
        keys = gumbel.keys(streams[i : i + 1], positions[i : i + 1] + taken, 0 if left is None else RESIDUAL)
        weights = target[i, taken] if left is None else left
        drawn = draw_weighted(weights, keys)
        out[i, taken] = drawn if drawn != NO_TOKEN else draw_weighted(target[i, taken], keys)
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
