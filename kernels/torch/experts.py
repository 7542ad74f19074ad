"""Mixtures of experts in plain torch: tokens sorted by expert, then one product per expert that was chosen at all.

A token's experts are summed in the order of their ids, so its result does not depend on other tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def route(logits: torch.Tensor, num_chosen: int, *, normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token and their weights.

    logits: [T, E] → weights: [T, num_chosen] like logits, expert ids: [T, num_chosen] int64

    The weights are the softmax over all experts, in float32; `normalised` divides them by the sum of the chosen ones.
    """
    weights, expert_ids = torch.topk(logits.float().softmax(dim=-1), num_chosen, dim=-1)
    if normalised:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), expert_ids


def mix_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    experts: Sequence[Callable[[torch.Tensor], torch.Tensor]],
) -> torch.Tensor:
    """The weighted sum of each token's experts.

    x: [T, hidden], weights and expert_ids: [T, num_chosen] → Σ weight · expert(x): [T, hidden]
    """
    flat = expert_ids.flatten()
    order = flat.argsort(stable=True)
    tokens = order // expert_ids.shape[1]
    counts = torch.bincount(flat, minlength=len(experts)).tolist()
    gathered, factors = x.index_select(0, tokens), weights.flatten().index_select(0, order).unsqueeze(1)
    out, first = torch.zeros_like(x), 0
    for expert, count in zip(experts, counts, strict=True):
        if count:
            end = first + count
            out.index_add_(0, tokens[first:end], expert(gathered[first:end]) * factors[first:end])
            first = end
    return out
