"""A mixture of experts, one token and one expert at a time, in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn import functional


def route(logits: torch.Tensor, num_chosen: int, *, normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token and their weights.

    logits: [T, E] → weights: [T, num_chosen], expert ids: [T, num_chosen] int64, likeliest first, on ties the lower id first.
    The weights are the softmax over all experts; `normalised` divides them by the sum of the chosen ones, which gives the
    softmax over those. All weights of a row that contains NaN or +inf, or only -inf, are NaN; its experts are unspecified.
    """
    weights, expert_ids = [], []
    for row in logits.float():
        exponentials = (row - row.max()).exp()
        chosen = sorted(range(len(row)), key=lambda expert: -row[expert].item())[:num_chosen]
        chosen_weights = (exponentials / exponentials.sum())[chosen]
        weights.append(chosen_weights / chosen_weights.sum() if normalised else chosen_weights)
        expert_ids.append(torch.tensor(chosen))
    return torch.stack(weights).to(logits.dtype), torch.stack(expert_ids)


def route_live(
    logits: torch.Tensor, num_chosen: int, *, normalised: bool, slots: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `route`; rows of padding (slot below 0) get expert E, which does not exist, with weight 0. slots: [T]"""
    weights, expert_ids = route(logits, num_chosen, normalised=normalised)
    if slots is not None:
        weights[slots < 0], expert_ids[slots < 0] = 0.0, logits.shape[1]
    return weights, expert_ids


def mix_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    experts: Sequence[Callable[[torch.Tensor], torch.Tensor]],
) -> torch.Tensor:
    """The weighted sum of each token's experts; expert E does not exist and adds nothing.

    x: [T, hidden], weights and expert_ids: [T, num_chosen] → Σ weight · expert(x): [T, hidden]
    """
    out = torch.zeros_like(x, dtype=torch.float32)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token].tolist(), expert_ids[token].tolist(), strict=True):
            if expert < len(experts):
                out[token] += weight * experts[expert](x[token : token + 1])[0].float()
    return out.to(x.dtype)


def mix_gated_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    activation: str = "silu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's gated experts.

    x: [T, hidden], gate_up: [E, 2·inner, hidden], down: [E, hidden, inner] → Σ weight · down(act(gate) · up): [T, hidden]
    """

    def activate(gate: torch.Tensor) -> torch.Tensor:
        return functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")

    def expert(index: int, row: torch.Tensor) -> torch.Tensor:
        gate, up = (row.float() @ gate_up[index].float().T).chunk(2, dim=1)
        return (activate(gate) * up) @ down[index].float().T

    mixed = mix_experts(x.float(), weights, expert_ids, [partial(expert, index) for index in range(gate_up.shape[0])])
    return mixed.to(x.dtype) if out is None else out.copy_(mixed)
