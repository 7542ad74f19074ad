"""The most likely token of each row by a product, a rounding and a search."""

from __future__ import annotations

import torch

from kernels.gumbel import NO_TOKEN
from kernels.quantised_weights import Weight
from kernels.reference.quantised import dequantise


def greedy_head(hidden: torch.Tensor, weight: Weight) -> torch.Tensor:
    """As `kernels.triton.sampling.greedy_head.greedy_head`."""
    logits = (hidden.float() @ dequantise(weight).T).to(hidden.dtype).float()
    largest = logits.amax(dim=-1)
    first = (logits == largest[:, None]).int().argmax(dim=-1)
    return torch.where(largest.isfinite(), first, NO_TOKEN)
