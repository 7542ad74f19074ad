"""Products with quantised weights for `table`: the exact references, with weights dequantised once when they are bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from kernels.quantised_weights import Fp8Weight, Int4Weight, Int8Weight
from kernels.reference.quantised import dequantise
from kernels.torch.fp8_rows import quantize_rows_fp8
from tests.support.rehearsal.tensors import DEVICE

__all__ = ["bind_fp8", "bind_int4", "bind_int8", "quantize_rows_fp8"]

Product = Callable[[torch.Tensor], torch.Tensor]


def _dequantise_on_host(weight: Any) -> torch.Tensor:
    """[N, K] float32 on the card; dequantised on the host, as some layouts are read element by element."""
    tensors = {each.name: getattr(weight, each.name) for each in fields(weight)}
    here = {name: value.cpu() for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    return dequantise(replace(weight, **here)).to(DEVICE)


def _product(x: torch.Tensor, wide: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    exact = x.float() @ wide.T
    return (exact if bias is None else exact + bias.float()).to(dtype)


def bind_int8(weight: Int8Weight | Int4Weight, bias: torch.Tensor | None) -> Product:
    wide = _dequantise_on_host(weight)
    return lambda x: _product(x, wide, bias, x.dtype)


bind_int4 = bind_int8


def bind_fp8(weight: Fp8Weight, bias: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    wide = _dequantise_on_host(weight)

    def multiply(
        x: torch.Tensor, *, x_scales: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        exact = x.float() if x_scales is None else x.float() * x_scales.float()
        return _product(exact, wide, bias, out_dtype or x.dtype)

    return multiply
