"""Products with quantised weights, each by the implementation of the device of its weights.

Weights are bound to a product once. CPUs have kernels compiled for their vector units, which repack the codes; GPUs have Triton
kernels, which read them as they are. Modules are imported on first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from kernels.fusible_products import FusibleProduct
from kernels.operations import FUSED_ROWS_MAX, LinearKernel
from kernels.quantised_weights import Fp8Weight, Int4Weight, Int8Weight

_MODULES = {
    "cpu": {
        "bind_fp8": "kernels.simd.fp8_linear",
        "bind_int4": "kernels.simd.int4_linear",
        "bind_int8": "kernels.simd.int8_linear",
        "quantize_rows_fp8": "kernels.torch.fp8_rows",
    },
    "cuda": {
        "bind_fp8": "kernels.triton.products.quantised",
        "bind_int4": "kernels.triton.products.quantised",
        "bind_int8": "kernels.triton.products.quantised",
        "quantize_rows_fp8": "kernels.triton.rows.fp8",
    },
}


@cache
def _load_function(name: str, device_type: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(_MODULES[device_type][name]), name)
    return function


class Fp8Rows(NamedTuple):
    """Quantised rows for a product with 8-bit weights, made by the preceding operation: e4m3 [T, K], scales [T, 1] float32, and
    the dtype of the original rows, which is also that of the product."""

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype


class Fp8Product:
    """A product [T, K] → [T, N] of e4m3 rows and weights; rows that are not `Fp8Rows` are quantised here.

    `unrounded` multiplies rows without quantising them. On a GPU it is also used here for up to FUSED_ROWS_MAX rows, because
    the time of such a step is spent on reading the weights."""

    takes_rows = True
    """Whether the preceding operation may quantise its input, with a scale for each row."""

    def __init__(self, weight: Fp8Weight, bias: torch.Tensor | None) -> None:
        self.unrounded = bind_fp8(weight, bias)
        self.weight: Fp8Weight | None = getattr(self.unrounded, "weight", None)  # None on CPUs, where it was repacked
        self.bias = bias

    def __call__(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
        if not isinstance(x, Fp8Rows):
            if x.shape[0] <= FUSED_ROWS_MAX and isinstance(self.unrounded, FusibleProduct):
                return self.unrounded(x)
            x = self.rounded(x)
        return self.unrounded(x.values, x_scales=x.scales, out_dtype=x.dtype)

    def rounded(self, x: torch.Tensor) -> Fp8Rows:
        """The quantised rows of x: [T, K]"""
        return Fp8Rows(*quantize_rows_fp8(x), x.dtype)


def bind_int8(weight: Int8Weight, bias: torch.Tensor | None) -> LinearKernel:
    """The product with an int8 weight: a function [T, K] → [T, N], like its input: x Wᵀ + bias"""
    product: LinearKernel = _load_function("bind_int8", weight.values.device.type)(weight, bias)
    return product


def bind_int4(weight: Int4Weight, bias: torch.Tensor | None) -> LinearKernel:
    """The product with an int4 weight: a function [T, K] → [T, N], like its input: x Wᵀ + bias"""
    product: LinearKernel = _load_function("bind_int4", weight.words.device.type)(weight, bias)
    return product


def bind_fp8(weight: Fp8Weight, bias: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    """The product with an e4m3 weight: a function (x, *, x_scales=None, out_dtype=None) → x Wᵀ + bias

    x: [T, K] float8_e4m3fn with x_scales [T, 1] or [1], or of another float type without → [T, N], like x or `out_dtype`.
    """
    product: Callable[..., torch.Tensor] = _load_function("bind_fp8", weight.values.device.type)(weight, bias)
    return product


def quantize_rows_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in e4m3, each with its scale. x: [T, hidden] → e4m3 [T, hidden] and scales [T, 1] float32"""
    rows: tuple[torch.Tensor, torch.Tensor] = _load_function("quantize_rows_fp8", x.device.type)(x)
    return rows
