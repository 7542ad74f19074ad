"""Products with weights of 4 bits in groups of columns: (code - zero) · scale, exact in float32, is the weight that is
multiplied.

A byte holds the codes of two outputs that are one vector apart. A group's entry is its scale as float32, with the zero point in
the lowest bits of the fraction, which are unused by a 16-bit scale.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.quantised_weights import CHUNK_RUNS, Int4Weight
from kernels.simd.coded_panels import bind, in_panels, panels_of
from kernels.simd.coded_tiles import (
    PANEL,
    PANEL_VECTORS,
    Format,
    as_bits,
    constants,
    emit_codes,
    load_integers,
    widened,
)
from kernels.simd.compiling import task
from kernels.simd.tiles import ROWS
from kernels.simd.vectors import LANES

_CODE, _CODE_BITS = 15, 4
_ZERO_POINT = 31
_BASES = 0x4B000000, 0x49000000
"""2²³ and 2¹⁹ as float32. A code in the lowest bits of the first, or four bits higher in the second, is added to the number.
This converts it to float without a shift, which would take the time of a multiplication."""


class _Int4(Format):
    column_bytes = PANEL // 2
    many_rows = 2 * ROWS

    def group(self, builder, entry, width):
        entries = [load_integers(builder, entry, LANES * i) for i in range(width)]
        zeros = [builder.and_(each, constants(_ZERO_POINT)) for each in entries]
        scales = [as_bits(builder, builder.and_(each, constants(~_ZERO_POINT))) for each in entries]
        return [(_added(builder, zero, i % 2), scale) for i, (zero, scale) in enumerate(zip(zeros, scales, strict=True))]

    def decode(self, builder, codes, width, group):
        values = []
        for i, (zero, scale) in enumerate(group):
            if i % 2 == 0:
                both = widened(builder, emit_codes(builder, codes, LANES * i // 2), signed=False)
            bits = builder.and_(both, constants(_CODE << _CODE_BITS * (i % 2)))
            number = as_bits(builder, builder.or_(bits, constants(_BASES[i % 2])))
            values.append(builder.fmul(builder.fsub(number, zero), scale))
        return values


def _added(builder, zeros, upper):
    """Zero points added to the base of the lower codes of a byte, or to that of the upper ones."""
    bits = builder.shl(zeros, constants(_CODE_BITS)) if upper else zeros
    return as_bits(builder, builder.or_(bits, constants(_BASES[upper])))


_body = panels_of(_Int4())


@task
def _panels(a):
    _body(a)


def bind_int4(weight: Int4Weight, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product with an int4 weight.

    Returns a function [T, K] → [T, N], like its input: x Wᵀ + bias. It keeps no reference to `weight` except its permutation.
    """
    permutation, codes = weight.permutation, _paired(in_panels(_codes(weight)))
    factors = torch.ones(weight.num_rows)
    multiply = bind(_panels, codes, factors, bias, weight.num_columns, groups=_entries(weight), group_size=weight.group_size)
    return multiply if permutation is None else lambda x: multiply(x.index_select(1, permutation))


def _codes(weight: Int4Weight) -> torch.Tensor:
    """→ [N, K] uint8, columns sorted by group, see `Int4Weight`"""
    num_chunks, num_outputs, num_words = weight.words.shape
    codes = torch.empty(num_outputs, num_chunks, CHUNK_RUNS, num_words, dtype=torch.uint8)
    for run in range(CHUNK_RUNS):
        codes[:, :, run] = weight.words.bitwise_right_shift(_CODE_BITS * run).bitwise_and_(_CODE).transpose(0, 1)
    return codes.view(num_outputs, -1)[:, : weight.num_columns]


def _paired(panels: torch.Tensor) -> torch.Tensor:
    """[panels, PANEL, K] → [panels, K, PANEL / 2]: the codes of two neighbouring vectors in a byte, the first in the lower
    bits"""
    vectors = panels.view(len(panels), PANEL_VECTORS // 2, 2, LANES, -1)
    pairs = vectors[:, :, 0] | vectors[:, :, 1] << _CODE_BITS
    return pairs.flatten(1, 2).transpose(1, 2).contiguous()


def _entries(weight: Int4Weight) -> torch.Tensor:
    """→ [N, groups] int32"""
    num_groups = -(-weight.num_columns // weight.group_size)
    stored = weight.scales_zeros[:num_groups].T
    scales = stored.bitwise_and(0xFFFF).to(torch.int16).view(weight.scale_dtype).float()
    return scales.view(torch.int32) | stored.bitwise_right_shift(16)
