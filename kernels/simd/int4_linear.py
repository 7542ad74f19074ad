"""Products with weights of 4 bits in groups of columns: the weight that is multiplied is (code - zero) · scale, exact
in float32.

A byte holds the codes of two outputs that are one vector apart. A group's entry is its scale as float32, with the zero point in
the lowest bits of the fraction, which are unused by a 16-bit scale.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.quantised_weights import CHUNK_RUNS, Int4Weight
from kernels.simd.compiling import task
from kernels.simd.quantised_panels import bind_panels, make_task_body, split_into_panels
from kernels.simd.quantised_tiles import (
    PANEL,
    PANEL_VECTORS,
    Format,
    emit_bits_as_float,
    emit_load_codes,
    emit_load_integers,
    emit_widen,
    integer_constant,
)
from kernels.simd.tiles import ROWS
from kernels.simd.vectors import LANES

_CODE_MASK, _CODE_BITS = 15, 4
_ZERO_POINT_MASK = 31
_BASES = 0x4B000000, 0x49000000
"""2²³ and 2¹⁹ as float32. A code in the lowest bits of the first, or four bits higher in the second, adds its value to the
number. This converts it to float without a shift, which would take the time of a multiplication."""


class _Int4(Format):
    column_bytes = PANEL // 2
    shared_decode_rows_min = 2 * ROWS

    def emit_group(self, builder, entry, width):
        entries = [emit_load_integers(builder, entry, LANES * i) for i in range(width)]
        zeros = [builder.and_(each, integer_constant(_ZERO_POINT_MASK)) for each in entries]
        scales = [emit_bits_as_float(builder, builder.and_(each, integer_constant(~_ZERO_POINT_MASK))) for each in entries]
        return [
            (_emit_add_to_base(builder, zero, i % 2), scale) for i, (zero, scale) in enumerate(zip(zeros, scales, strict=True))
        ]

    def emit_decode(self, builder, codes, width, group):
        values = []
        for i, (zero, scale) in enumerate(group):
            if i % 2 == 0:
                code_pairs = emit_widen(builder, emit_load_codes(builder, codes, LANES * i // 2), signed=False)
            bits = builder.and_(code_pairs, integer_constant(_CODE_MASK << _CODE_BITS * (i % 2)))
            number = emit_bits_as_float(builder, builder.or_(bits, integer_constant(_BASES[i % 2])))
            values.append(builder.fmul(builder.fsub(number, zero), scale))
        return values


def _emit_add_to_base(builder, zeros, upper):
    """Add zero points to the base of the lower codes of a byte, or to that of the upper ones."""
    bits = builder.shl(zeros, integer_constant(_CODE_BITS)) if upper else zeros
    return emit_bits_as_float(builder, builder.or_(bits, integer_constant(_BASES[upper])))


_multiply_panels_body = make_task_body(_Int4())


@task
def _multiply_panels(a):
    _multiply_panels_body(a)


def bind_int4(weight: Int4Weight, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product with an int4 weight.

    Returns a function [T, K] → [T, N], like its input: x Wᵀ + bias. It keeps no reference to `weight` except its permutation.
    """
    permutation, codes = weight.permutation, _pack_pairs(split_into_panels(_unpack_codes(weight)))
    factors = torch.ones(weight.num_rows)
    multiply = bind_panels(
        _multiply_panels, codes, factors, bias, weight.num_columns, groups=_group_entries(weight), group_size=weight.group_size
    )
    return multiply if permutation is None else lambda x: multiply(x.index_select(1, permutation))


def _unpack_codes(weight: Int4Weight) -> torch.Tensor:
    """→ [N, K] uint8, columns sorted by group, see `Int4Weight`"""
    num_chunks, num_outputs, num_words = weight.words.shape
    codes = torch.empty(num_outputs, num_chunks, CHUNK_RUNS, num_words, dtype=torch.uint8)
    for run in range(CHUNK_RUNS):
        codes[:, :, run] = weight.words.bitwise_right_shift(_CODE_BITS * run).bitwise_and_(_CODE_MASK).transpose(0, 1)
    return codes.view(num_outputs, -1)[:, : weight.num_columns]


def _pack_pairs(panels: torch.Tensor) -> torch.Tensor:
    """[panels, PANEL, K] → [panels, K, PANEL / 2]: the codes of two neighbouring vectors in a byte, the first in the lower
    bits"""
    vectors = panels.view(len(panels), PANEL_VECTORS // 2, 2, LANES, -1)
    pairs = vectors[:, :, 0] | vectors[:, :, 1] << _CODE_BITS
    return pairs.flatten(1, 2).transpose(1, 2).contiguous()


def _group_entries(weight: Int4Weight) -> torch.Tensor:
    """→ [N, groups] int32"""
    num_groups = -(-weight.num_columns // weight.group_size)
    stored = weight.scales_zeros[:num_groups].T
    scales = stored.bitwise_and(0xFFFF).to(torch.int16).view(weight.scale_dtype).float()
    return scales.view(torch.int32) | stored.bitwise_right_shift(16)
