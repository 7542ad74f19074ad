"""Filters that leave only some tokens to draw from, on a row's most likely candidates. Pure functions of tensors.

Order, as in `transformers`: top-k, top-p (arXiv 1904.09751) on what top-k left, min-p (arXiv 2407.01082), and typical
sampling (arXiv 2202.00666) on what these left. All of them work on probabilities after temperature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.protocol import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures below are greedy: a float32 column cannot hold the smallest of them, and none of them would draw otherwise."""

LOG2_E = 1.4426950408889634


def is_greedy(sampling: SamplingParams) -> bool:
    """Whether the largest logit is taken, the lowest id among equals; a single candidate is that one too."""
    return sampling.temperature < GREEDY_BELOW or sampling.top_k == 1


def scale_of(sampling: SamplingParams) -> float:
    """What logits are multiplied by to count binary orders of probability; 0 is greedy."""
    return 0.0 if is_greedy(sampling) else LOG2_E / sampling.temperature


def neg_log2_min_p_of(sampling: SamplingParams) -> float:
    """−log2(min_p): min-p keeps what lies at most so many binary orders below the likeliest token; inf is off."""
    return -math.log2(sampling.min_p) if sampling.min_p > 0.0 else math.inf


def is_filtered(sampling: SamplingParams) -> bool:
    """Whether anything is left out before a token is drawn."""
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0 or sampling.typical_p < 1.0


def needs_all_tokens(sampling: SamplingParams) -> bool:
    """Whether the filter cannot be computed on the most likely candidates: typical sampling of the whole vocabulary."""
    return sampling.typical_p < 1.0 and sampling.top_k <= 0 and sampling.top_p >= 1.0 and sampling.min_p <= 0.0


@dataclass(frozen=True, slots=True)
class FilterColumns:
    """The filters of B rows: top_k (0 is off) int64, the others float32, [B, 1] each; `typical_p` is None when all are off."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    typical_p: torch.Tensor | None

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> FilterColumns:
        is_typical = any(p.typical_p < 1.0 for p in params)
        return cls(
            top_k=column([max(0, p.top_k) for p in params], torch.int64, device),
            top_p=column([p.top_p for p in params], torch.float32, device),
            min_p=column([p.min_p for p in params], torch.float32, device),
            typical_p=column([p.typical_p for p in params], torch.float32, device) if is_typical else None,
        )


def column(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[B, 1] on `device`"""
    return torch.tensor(values, dtype=dtype).to(device)[:, None]


def filtered_candidates(
    scaled: torch.Tensor, count: int, filters: FilterColumns
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `count` most likely ids of each row, and their weights with everything that is filtered out set to zero.

    scaled: [B, V] logits over temperature → ids [B, count] int64, weights [B, count] float32, and [B] bool: whether even the
    least likely candidate passed top-k, top-p and min-p, so that more of them must be looked at
    """
    values, ids = scaled.topk(count, dim=-1)
    has_top_k = filters.top_k > 0
    within_k = (torch.arange(count, device=scaled.device)[None, :] < filters.top_k) | ~has_top_k
    in_vocabulary = torch.logsumexp(scaled, dim=-1, keepdim=True)
    in_top_k = torch.logsumexp(values.masked_fill(~within_k, float("-inf")), dim=-1, keepdim=True)
    total = torch.where(has_top_k, in_top_k, in_vocabulary)
    weights = (values - total).exp().masked_fill_(~within_k, 0.0)
    before = weights.cumsum(dim=-1) - weights
    keep = (before < filters.top_p) & (weights >= filters.min_p * weights[:, :1])
    keep[:, 0] = True  # a top_p that float32 rounds to zero keeps it too
    weights = weights * keep
    reaches_end = (weights[:, -1] > 0) & ~has_top_k[:, 0]
    if filters.typical_p is not None:
        weights = weights * typical(weights, filters.typical_p)
    return ids, weights, reaches_end


def typical_tokens(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Weights of the whole vocabulary for rows that `needs_all_tokens`, zero where typical sampling leaves out: [B, V]

    scaled: [B, V] logits over temperature
    """
    weights = torch.softmax(scaled, dim=-1)
    return weights.mul_(typical(weights, column([p.typical_p for p in params], torch.float32, scaled.device)))


def typical(weights: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Which tokens locally typical sampling keeps: [B, C] bool

    weights: [B, C] ≥ 0, in proportion to the probabilities; mass: [B, 1]. Tokens are taken in the order of how far their
    surprise −log p lies from the entropy, until `mass` is reached (section 3 of arXiv 2202.00666); equals stay together.
    """
    probabilities = weights / weights.sum(dim=-1, keepdim=True)
    surprise = -probabilities.log()
    entropy = torch.where(probabilities > 0, probabilities * surprise, 0.0).sum(dim=-1, keepdim=True)
    distance, order = (surprise - entropy).abs().sort(dim=-1)
    reached = probabilities.gather(1, order).cumsum(dim=-1)
    last = (reached < mass).sum(dim=-1, keepdim=True).clamp_(max=weights.shape[-1] - 1)
    keep = (surprise - entropy).abs() <= distance.gather(1, last)
    return keep | (mass >= 1.0)
