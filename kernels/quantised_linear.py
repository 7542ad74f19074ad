"""Products with quantised weights: each from the implementation of the device of its weights, as `kernels.ops` promises.

Weights are bound to a product once. CPUs have kernels compiled for their vectors, which pack the codes anew; GPUs have Triton
kernels, which read them as they are. Modules are imported by the first one that asks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from kernels.cpu.fp8_rows import to_fp8
from kernels.operations import FUSED_ROWS_MAX, LinearKernel
from kernels.plain_weights import PlainWeights
from kernels.quantised_weights import Fp8Weight, Int4Weight, Int8Weight

__all__ = [
    "Fp8Product",
    "Fp8Rows",
    "bind_fp8",
    "bind_int4",
    "bind_int8",
    "quantised_words",
    "quantize_rows_fp8",
    "to_fp8",
]

_MODULES = {
    "cpu": {
        "bind_fp8": "kernels.simd.fp8_linear",
        "bind_int4": "kernels.simd.int4_linear",
        "bind_int8": "kernels.simd.int8_linear",
        "quantize_rows_fp8": "kernels.cpu.fp8_rows",
    },
    "cuda": {
        "bind_fp8": "kernels.triton.quantised_products",
        "bind_int4": "kernels.triton.quantised_products",
        "bind_int8": "kernels.triton.quantised_products",
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
    """[T, K] → [T, N] with e4m3 weights and rows, which are rounded here unless they come as `Fp8Rows`.

    `unrounded` multiplies rows as they are. On a GPU it multiplies up to FUSED_ROWS_MAX of them here too: such a step waits for
    nothing but the weights."""

    takes_rows = True
    """Whether the preceding operation may quantise its input, with a scale for each row."""

    def __init__(self, weight: Fp8Weight, bias: torch.Tensor | None) -> None:
        self.unrounded = bind_fp8(weight, bias)
        self.weight: Fp8Weight | None = getattr(self.unrounded, "weight", None)  # on CPUs it was packed anew
        self.bias = bias

    def __call__(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
        if not isinstance(x, Fp8Rows):
            if x.shape[0] <= FUSED_ROWS_MAX and isinstance(self.unrounded, PlainWeights):
                return self.unrounded(x)
            x = self.rounded(x)
        return self.unrounded(x.values, x_scales=x.scales, out_dtype=x.dtype)

    def rounded(self, x: torch.Tensor) -> Fp8Rows:
        """x: [T, K] → the rows that are multiplied in its place"""
        return Fp8Rows(*quantize_rows_fp8(x), x.dtype)


def bind_int8(weight: Int8Weight, bias: torch.Tensor | None) -> LinearKernel:
    """→ a function [T, K] → [T, N], like its input: x Wᵀ + bias"""
    product: LinearKernel = _found("bind_int8", weight.values.device.type)(weight, bias)
    return product


def bind_int4(weight: Int4Weight, bias: torch.Tensor | None) -> LinearKernel:
    """→ a function [T, K] → [T, N], like its input: x Wᵀ + bias"""
    product: LinearKernel = _found("bind_int4", weight.words.device.type)(weight, bias)
    return product


def bind_fp8(weight: Fp8Weight, bias: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    """→ a function (x, *, x_scales=None, out_dtype=None): x Wᵀ + bias: [T, N], like x or `out_dtype`

    x: [T, K] float8_e4m3fn with x_scales [T, 1] or [1], or of another float type without.
    """
    product: Callable[..., torch.Tensor] = _found("bind_fp8", weight.values.device.type)(weight, bias)
    return product


def quantize_rows_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [T, hidden] → e4m3 [T, hidden] and scales [T, 1] float32"""
    rows: tuple[torch.Tensor, torch.Tensor] = _found("quantize_rows_fp8", x.device.type)(x)
    return rows


def quantised_words(name: str, device: torch.device) -> str:
    """How weights kept as `name` are multiplied on a device, in words."""
    return f"{name} weights decoded in registers" if device.type == "cpu" else f"{name} weights"
