"""Products with weights of 8-bit floats (e4m3): a column's codes become float32 by a shift and a mask.

Widening brings the sign into place, the shift exponent and fraction. Exponents of float32 are biased by 127 and those of e4m3
by 7, so the same bits mean a number 2¹²⁰ times smaller. Half of this factor is applied to inputs and half to the scales of the
sums: multiplying each weight would take an eighth of the time of many rows. Inputs must stay below 2⁶⁸; sums above 2⁻⁶⁶, as
multiples of a weight's scale, have full precision. NaN becomes 480.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.quantised_weights import Fp8Weight
from kernels.simd.compiling import task
from kernels.simd.quantised_panels import bind_panels, make_task_body, split_into_panels
from kernels.simd.quantised_tiles import PANEL, Format, emit_bits_as_float, emit_load_codes, emit_widen, integer_constant
from kernels.simd.vectors import LANES
from kernels.torch.fp8_decode import decode_fp8

_SHIFT = 20
_SIGN_AND_SEVEN_BITS = 0x87F00000 - (1 << 32)
_INPUT_FACTOR = 2.0**60
_SCALE_FACTOR = 2.0**60


class _Fp8(Format):
    column_bytes = PANEL

    def emit_decode(self, builder, codes, width, group):
        values = []
        for i in range(width):
            bits = builder.shl(
                emit_widen(builder, emit_load_codes(builder, codes, LANES * i), signed=True), integer_constant(_SHIFT)
            )
            values.append(emit_bits_as_float(builder, builder.and_(bits, integer_constant(_SIGN_AND_SEVEN_BITS))))
        return values


_multiply_panels_body = make_task_body(_Fp8())


@task
def _multiply_panels(a):
    _multiply_panels_body(a)


def bind_fp8(weight: Fp8Weight, bias: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    """The product with an e4m3 weight, as `kernels.quantised_linear.bind_fp8`; it keeps no reference to `weight`."""
    codes = split_into_panels(weight.values.view(torch.int8)).transpose(1, 2).contiguous()
    multiply = bind_panels(_multiply_panels, codes, weight.scales * _SCALE_FACTOR, bias, weight.values.shape[1])

    def linear(x: torch.Tensor, *, x_scales: torch.Tensor | None = None, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        rows = decode_fp8(x, torch.float32) if x.dtype.itemsize == 1 else x.float()
        factor = _INPUT_FACTOR if x_scales is None else x_scales * _INPUT_FACTOR
        return multiply(rows * factor).to(out_dtype or x.dtype)

    return linear
