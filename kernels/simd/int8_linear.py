"""Products with weights of 8-bit integers: codes are widened and converted, and the sums are multiplied by the
scales of their outputs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.quantised_weights import Int8Weight
from kernels.simd.compiling import task
from kernels.simd.quantised_panels import bind_panels, make_task_body, split_into_panels
from kernels.simd.quantised_tiles import PANEL, Format, emit_load_codes, emit_to_float, emit_widen
from kernels.simd.vectors import LANES


class _Int8(Format):
    column_bytes = PANEL

    def emit_decode(self, builder, codes, width, group):
        return [
            emit_to_float(builder, emit_widen(builder, emit_load_codes(builder, codes, LANES * i), signed=True))
            for i in range(width)
        ]


_multiply_panels_body = make_task_body(_Int8())


@task
def _multiply_panels(a):
    _multiply_panels_body(a)


def bind_int8(weight: Int8Weight, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product with an int8 weight, [T, K] → [T, N], like its input: x Wᵀ + bias; it keeps no reference to `weight`."""
    codes = split_into_panels(weight.values).transpose(1, 2).contiguous()
    return bind_panels(_multiply_panels, codes, weight.scales, bias, weight.values.shape[1])
