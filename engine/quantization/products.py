"""Quantised matrices bound to the product that reads them: functions [T, in] → [T, out], as `ops.pack_linear` makes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.config.quantization import Activations
from kernels import ops


def fp8_product(
    weight: ops.Fp8Weight, bias: torch.Tensor | None, activations: Activations, input_scale: torch.Tensor | None = None
) -> ops.LinearKernel:
    """Weights in 8-bit floats. Inputs are rounded to them by a scale of each row or by `input_scale`, [1], or not at all."""
    if activations is Activations.DYNAMIC:
        product: ops.LinearKernel = ops.Fp8Product(weight, bias)
        return product
    if activations is Activations.UNTOUCHED:
        return ops.bind_fp8(weight, bias)
    assert input_scale is not None, "the checkpoint gives the scale"
    return StaticFp8Product(weight, bias, input_scale)


class StaticFp8Product:
    """[T, K] → [T, N]; every input is divided by one scale, [1], and rounded to e4m3. Else as `ops.Fp8Product`."""

    def __init__(self, weight: ops.Fp8Weight, bias: torch.Tensor | None, input_scale: torch.Tensor) -> None:
        self.unrounded = ops.bind_fp8(weight, bias)
        self._input_scale = input_scale
        self.weight: ops.Fp8Weight | None = getattr(self.unrounded, "weight", None)  # on CPUs it was packed anew
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.rounded(x)
        return self.unrounded(rows.values, x_scales=rows.scales, out_dtype=rows.dtype)

    def rounded(self, x: torch.Tensor) -> ops.Fp8Rows:
        """x: [T, K] → the rows that are multiplied in its place, all with the one scale"""
        return ops.Fp8Rows(ops.to_fp8(x.float() / self._input_scale), self._input_scale, x.dtype)


def side_by_side(products: Sequence[ops.LinearKernel]) -> ops.LinearKernel:
    """Several products of the same input, their outputs one after the other."""
    if len(products) == 1:
        return products[0]
    return lambda x: torch.cat([multiply(x) for multiply in products], dim=-1)
