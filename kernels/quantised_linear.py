"""Products with quantised weights: each from the implementation of the device of its input, as `kernels.ops` promises.

On CPUs weights of 8-bit integers are multiplied by the processor's own instructions where their sums are exact, and all others
are decoded; on GPUs all have Triton kernels, whose modules are imported by the first one that asks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from kernels.cpu.fp8_rows import to_fp8
from kernels.cpu.int8_digits import bind_int8_digits, is_exact
from kernels.cpu.linear import LinearKernel
from kernels.plain_weights import PlainWeights
from kernels.quantised_weights import Fp8Weight, Int4Weight, Int8Weight

__all__ = [
    "Fp8Product",
    "Fp8Rows",
    "bind_int8",
    "linear_fp8",
    "linear_int4",
    "linear_int8",
    "quantised_words",
    "quantize_rows_fp8",
    "to_fp8",
]

_MODULES = {
    "cpu": {
        "linear_fp8": "kernels.cpu.decoded_linear",
        "linear_int4": "kernels.cpu.decoded_linear",
        "linear_int8": "kernels.cpu.decoded_linear",
        "quantize_rows_fp8": "kernels.cpu.fp8_rows",
    },
    "cuda": {
        "linear_fp8": "kernels.triton.linear_fp8",
        "linear_int4": "kernels.triton.linear_int4",
        "linear_int8": "kernels.triton.linear_int8",
        "quantize_rows_fp8": "kernels.triton.fp8_rows",
    },
}


@cache
def _found(name: str, device_type: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module(_MODULES[device_type][name]), name)
    return found


class Fp8Rows(NamedTuple):
    """Rows for a product with 8-bit weights, made by what stands before it: e4m3 [T, K], scales [T, 1] float32, and the type
    that the rows would have had, which is that of the product."""

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype


class Fp8Product:
    """[T, K] → [T, N] with e4m3 weights and rows, which are rounded here unless they come as `Fp8Rows`."""

    def __init__(self, weight: Fp8Weight, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
        rows = x if isinstance(x, Fp8Rows) else Fp8Rows(*quantize_rows_fp8(x), x.dtype)
        return linear_fp8(rows.values, self._weight, x_scales=rows.scales, out_dtype=rows.dtype, bias=self._bias)


class Int8Product(PlainWeights):
    """[T, K] → [T, N], like its input. Inputs stay as they are, so that it may be fused with the norms around it."""

    def __init__(self, weight: Int8Weight, bias: torch.Tensor | None) -> None:
        self.weight = weight  # type: ignore[assignment]  # the fused products take such weights as well
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        return linear_int8(x, weight, bias=self.bias)


def bind_int8(weight: Int8Weight, bias: torch.Tensor | None) -> LinearKernel:
    """→ a function [T, K] → [T, N], like its input: x Wᵀ + bias"""
    if weight.values.device.type != "cpu" or not is_exact():
        return Int8Product(weight, bias)
    multiply = bind_int8_digits(weight)
    return multiply if bias is None else lambda x: multiply(x).add_(bias)


def linear_int8(x: torch.Tensor, weight: Int8Weight, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x: [M, K] → x Wᵀ + bias: [M, N] like x"""
    product: torch.Tensor = _found("linear_int8", x.device.type)(x, weight, bias=bias)
    return product


def linear_int4(x: torch.Tensor, weight: Int4Weight, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x: [M, K] → x Wᵀ + bias: [M, N] like x"""
    product: torch.Tensor = _found("linear_int4", x.device.type)(x, weight, bias=bias)
    return product


def linear_fp8(
    x: torch.Tensor,
    weight: Fp8Weight,
    *,
    x_scales: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x: [M, K] float8_e4m3fn with x_scales [M, 1] or [1], or a float x without → x Wᵀ + bias: [M, N], like x or `out_dtype`"""
    multiply = _found("linear_fp8", x.device.type)
    product: torch.Tensor = multiply(x, weight, x_scales=x_scales, out_dtype=out_dtype, bias=bias)
    return product


def quantize_rows_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [T, hidden] → e4m3 [T, hidden] and scales [T, 1] float32"""
    rows: tuple[torch.Tensor, torch.Tensor] = _found("quantize_rows_fp8", x.device.type)(x)
    return rows


def quantised_words(name: str, device: torch.device) -> str:
    """How weights kept as `name` are multiplied on a device, in words."""
    if device.type != "cpu":
        return f"{name} weights"
    return "int8 weights by VNNI" if name == "int8" and is_exact() else f"{name} weights decoded at every product"
