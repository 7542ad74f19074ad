"""Quantised matrices bound to the product that reads them: functions [T, in] → [T, out] like those of `ops.pack_linear`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.config.stored_weights import Activations
from kernels import ops


def fp8_product(
    weight: ops.Fp8Weight,
    bias: torch.Tensor | None,
    activations: Activations,
    input_scales: Sequence[tuple[int, torch.Tensor]] = (),
) -> ops.LinearKernel:
    """A product with weights in 8-bit floats. Its inputs are rounded to 8 bits with a scale for each row, or not at all, or
    with `input_scales`: pairs of a number of weight rows and the [1] by which the inputs of these are divided."""
    if activations is Activations.DYNAMIC:
        product: ops.LinearKernel = ops.Fp8Product(weight, bias)
        return product
    if activations is Activations.UNTOUCHED:
        return ops.bind_fp8(weight, bias)
    if len(input_scales) == 1:
        return StaticFp8Product(weight, bias, input_scales[0][1])
    return StaticFp8Products(weight, bias, input_scales)


class StaticFp8Product(ops.Fp8Product):
    """[T, K] → [T, N]; every input is divided by one scale, [1], and rounded to e4m3. Else as `ops.Fp8Product`."""

    takes_rows = False

    def __init__(self, weight: ops.Fp8Weight, bias: torch.Tensor | None, input_scale: torch.Tensor) -> None:
        super().__init__(weight, bias)
        self._input_scale = input_scale

    def rounded(self, x: torch.Tensor) -> ops.Fp8Rows:
        """x: [T, K] → the quantised rows, all with the one scale"""
        return ops.Fp8Rows(ops.to_fp8(x.float() / self._input_scale), self._input_scale, x.dtype)


class StaticFp8Products:
    """[T, K] → [T, N]: `parts` of one weight, each of which rounds the same inputs with a scale of its own. Inputs that are not
    rounded are multiplied with the whole weight at once."""

    def __init__(
        self, weight: ops.Fp8Weight, bias: torch.Tensor | None, input_scales: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        sizes = [num_rows for num_rows, _ in input_scales]
        pieces = zip(torch.split(weight.values, sizes), torch.split(weight.scales, sizes), strict=True)
        weights = [ops.Fp8Weight(values, scales) for values, scales in pieces]
        biases = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
        scales = [scale for _, scale in input_scales]
        self.parts = [StaticFp8Product(*part) for part in zip(weights, biases, scales, strict=True)]
        # On CPUs, which round every row, each part is repacked, and nothing would read the whole weight.
        self.unrounded = None if self.parts[0].weight is None else ops.bind_fp8(weight, bias)
        self.weight, self.bias = None if self.unrounded is None else weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.unrounded is not None and x.shape[0] <= ops.FUSED_ROWS_MAX:
            return self.unrounded(x)
        return torch.cat([multiply(x) for multiply in self.parts], dim=-1)


def concat_outputs(products: Sequence[ops.LinearKernel]) -> ops.LinearKernel:
    """One function that multiplies the same input by several matrices and concatenates the outputs."""
    if len(products) == 1:
        return products[0]
    return lambda x: torch.cat([multiply(x) for multiply in products], dim=-1)
