"""Products with weights of 8-bit integers: codes are widened and converted, and sums are multiplied by their outputs'
scales."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.quantised_weights import Int8Weight
from kernels.simd.coded_panels import bind, in_panels, panels_of
from kernels.simd.coded_tiles import PANEL, Format, as_floats, emit_codes, widened
from kernels.simd.compiling import task
from kernels.simd.vectors import LANES


class _Int8(Format):
    column_bytes = PANEL

    def decode(self, builder, codes, width, group):
        return [as_floats(builder, widened(builder, emit_codes(builder, codes, LANES * i), signed=True)) for i in range(width)]


_body = panels_of(_Int8())


@task
def _panels(a):
    _body(a)


def bind_int8(weight: Int8Weight, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product with an int8 weight, [T, K] → [T, N], like its input: x Wᵀ + bias; it keeps no reference to `weight`."""
    codes = in_panels(weight.values).transpose(1, 2).contiguous()
    return bind(_panels, codes, weight.scales, bias, weight.values.shape[1])
