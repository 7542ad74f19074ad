"""Quantised matrices bound to the product that reads them: functions [T, in] → [T, out], as `ops.pack_linear` makes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.config.quantization import Activations
from kernels import ops


def int4_product(weight: ops.Int4Weight, bias: torch.Tensor | None) -> ops.LinearKernel:
    """Weights in 4 bits, inputs as they are."""
    return lambda x: ops.linear_int4(x, weight, bias=bias)


def fp8_product(
    weight: ops.Fp8Weight, bias: torch.Tensor | None, activations: Activations, input_scale: torch.Tensor | None = None
) -> ops.LinearKernel:
    """Weights in 8-bit floats. Inputs are rounded to them by a scale of each row or by `input_scale`, [1], or not at all."""

    def static(x: torch.Tensor) -> torch.Tensor:
        assert input_scale is not None, "the checkpoint gives the scale"
        return ops.linear_fp8(ops.to_fp8(x.float() / input_scale), weight, x_scales=input_scale, out_dtype=x.dtype, bias=bias)

    products: dict[Activations, ops.LinearKernel] = {
        Activations.DYNAMIC: ops.Fp8Product(weight, bias),
        Activations.STATIC: static,
        Activations.UNTOUCHED: lambda x: ops.linear_fp8(x, weight, bias=bias),
    }
    return products[activations]


def side_by_side(products: Sequence[ops.LinearKernel]) -> ops.LinearKernel:
    """Several products of the same input, their outputs one after the other."""
    if len(products) == 1:
        return products[0]
    return lambda x: torch.cat([multiply(x) for multiply in products], dim=-1)
