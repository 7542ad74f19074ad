"""Quantised linear layers on a GPU; the kernels read the weights in their packed layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernels.fusible_products import FusibleProduct
from kernels.quantised_weights import Int4Weight, Int8Weight
from kernels.triton.products.fp8 import linear_fp8
from kernels.triton.products.int4 import linear_int4
from kernels.triton.products.int8 import linear_int8


class WeightOnlyLinear(FusibleProduct):
    """See `kernels.quantised_linear.bind_int8` and `bind_int4`. Inputs are not quantised, so it may be fused with the norms
    around it."""

    def __init__(
        self, multiply: Callable[..., torch.Tensor], weight: Int8Weight | Int4Weight, bias: torch.Tensor | None
    ) -> None:
        super().__init__(weight, bias)
        self._multiply = multiply

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, self.weight, bias=self.bias)


class Fp8Linear(FusibleProduct):
    """See `kernels.quantised_linear.bind_fp8`. Without input scales inputs are not quantised, so it may be fused too."""

    def __call__(
        self, x: torch.Tensor, *, x_scales: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return linear_fp8(x, self.weight, x_scales=x_scales, out_dtype=out_dtype, bias=self.bias)


bind_fp8, bind_int8, bind_int4 = Fp8Linear, partial(WeightOnlyLinear, linear_int8), partial(WeightOnlyLinear, linear_int4)
