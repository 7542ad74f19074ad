"""The most likely token of each row by a product, a rounding and a search."""

from __future__ import annotations

import torch

from kernels.gumbel import NO_TOKEN
from kernels.quantised_weights import Fp8Weight, Int8Weight
from kernels.reference.quantised import dequantise_fp8, dequantise_int8


def greedy_head(hidden: torch.Tensor, weight: torch.Tensor | Int8Weight | Fp8Weight) -> torch.Tensor:
    """As `kernels.triton.greedy_head.greedy_head`."""
    logits = (hidden.float() @ _exact(weight).T).to(hidden.dtype).float()
    largest = logits.amax(dim=-1)
    first = (logits == largest[:, None]).int().argmax(dim=-1)
    return torch.where(largest.isfinite(), first, NO_TOKEN)


def _exact(weight: torch.Tensor | Int8Weight | Fp8Weight) -> torch.Tensor:
    """[V, K] float32"""
    if isinstance(weight, torch.Tensor):
        return weight.float()
    return dequantise_int8(weight) if isinstance(weight, Int8Weight) else dequantise_fp8(weight)
