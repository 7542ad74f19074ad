"""The matrices of all experts as tables of addresses: unquantised, or in codes of 8 or 4 bits with their scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from kernels.quantised_weights import Fp8Weight, Int4Weight, Int8Weight, Weight, values_and_scales


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One matrix [N, K] per expert, each at any address.

    addresses: [E] int64, of each expert's values or codes. scale_addresses: [E] int64, of its scales: [N] float32 for codes of
    8 bits, `Int4Weight.scales_zeros` for 4; None for unquantised values. `first`: the first expert's matrix, whose format all
    others share; `tensors` keeps alive what the addresses refer to.
    """

    addresses: torch.Tensor
    scale_addresses: torch.Tensor | None
    first: Weight
    tensors: tuple[torch.Tensor, ...]

    @property
    def num_experts(self) -> int:
        return self.addresses.numel()

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and columns."""
        if isinstance(self.first, Int4Weight):
            return self.first.num_rows, self.first.num_columns
        num_outputs, num_columns = _values(self.first).shape
        return num_outputs, num_columns

    @property
    def row_stride(self) -> int:
        """Stride between rows, in values or 8-bit codes."""
        return _values(self.first).stride(0)

    @property
    def code_dtype(self) -> Any:
        """The dtype in which the kernel reads 8-bit codes; None for unquantised values."""
        return {Int8Weight: tl.int8, Fp8Weight: tl.float8e4nv}.get(type(self.first))


def have_same_format(weights: Sequence[Weight]) -> bool:
    """Whether one launch can read all of them. An expert with permuted columns would need rows in that order."""
    first = weights[0]
    if isinstance(first, Int4Weight):
        formats = {
            (each.group_size, each.scale_dtype, each.permutation is None) if isinstance(each, Int4Weight) else None
            for each in weights
        }
        return formats == {(first.group_size, first.scale_dtype, True)}
    return all(type(each) is type(first) for each in weights)


def bind_weights(weights: Sequence[Weight]) -> ExpertWeights:
    """Binds matrices of one format and shape, 16-byte aligned, with equal row strides. Raises ValueError if they differ."""
    if not have_same_format(weights):
        raise ValueError("the experts' matrices differ in their format")
    values = [_values(weight) for weight in weights]
    first = values[0]
    layout = first.shape, first.stride(), first.dtype, first.device
    if any((other.shape, other.stride(), other.dtype, other.device) != layout for other in values):
        raise ValueError("the experts' matrices differ in shape, layout or type")
    if first.stride(-1) != 1 or any(other.data_ptr() % 16 for other in values):
        raise ValueError("the experts' matrices must begin on 16 bytes and have contiguous rows")
    scales = [_scales(weight) for weight in weights if not isinstance(weight, torch.Tensor)]
    return ExpertWeights(_addresses(values), _addresses(scales) if scales else None, weights[0], (*values, *scales))


def _addresses(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64).to(tensors[0].device)


def _values(weight: Weight) -> torch.Tensor:
    return weight.words if isinstance(weight, Int4Weight) else values_and_scales(weight)[0]


def _scales(weight: Int8Weight | Fp8Weight | Int4Weight) -> torch.Tensor:
    return (weight.scales_zeros if isinstance(weight, Int4Weight) else weight.scales).contiguous()
