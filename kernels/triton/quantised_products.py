"""Quantised matrices as functions on a GPU: the kernels read the weights as they were packed."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kernels.plain_weights import PlainWeights
from kernels.quantised_weights import Fp8Weight, Int4Weight, Int8Weight
from kernels.triton.linear_fp8 import linear_fp8
from kernels.triton.linear_int4 import linear_int4
from kernels.triton.linear_int8 import linear_int8


class Int8Product(PlainWeights):
    """[T, K] → [T, N], like its input. Inputs stay as they are, so that it may be fused with the norms around it."""

    def __init__(self, weight: Int8Weight, bias: torch.Tensor | None) -> None:
        self.weight = weight  # type: ignore[assignment]  # the fused products take such weights as well
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        return linear_int8(x, weight, bias=self.bias)


bind_int8 = Int8Product


def bind_int4(weight: Int4Weight, bias: torch.Tensor | None) -> partial[torch.Tensor]:
    """→ a function [T, K] → [T, N], like its input: x Wᵀ + bias"""
    return partial(linear_int4, weight=weight, bias=bias)


def bind_fp8(weight: Fp8Weight, bias: torch.Tensor | None) -> partial[torch.Tensor]:
    """→ a function as `kernels.quantised_linear.bind_fp8` says"""
    return partial(linear_fp8, weight=weight, bias=bias)
