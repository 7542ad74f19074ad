"""Products with weights of 4 bits in groups of columns: code - zero is multiplied, and the sum of a group gets its scale.

A byte holds the codes of two outputs that stand a vector apart. An entry of a group is its scale as float32 with the zero point
in the lowest bits of the fraction, which a scale of 16 bits leaves empty.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.quantised_weights import CHUNK_RUNS, Int4Weight
from kernels.simd.coded_panels import bind, in_panels, way_through
from kernels.simd.coded_tiles import (
    PANEL,
    PANEL_VECTORS,
    Format,
    as_bits,
    as_floats,
    constants,
    emit_codes,
    load_integers,
    widened,
)
from kernels.simd.compiling import task
from kernels.simd.vectors import LANES

_CODE, _CODE_BITS = 15, 4
_ZERO_POINT = 31


class _Int4(Format):
    column_bytes = PANEL // 2

    def group(self, builder, entry, width):
        entries = [load_integers(builder, entry, LANES * i) for i in range(width)]
        scales = [as_bits(builder, builder.and_(each, constants(~_ZERO_POINT))) for each in entries]
        return scales, [builder.and_(each, constants(_ZERO_POINT)) for each in entries]

    def decode(self, builder, codes, width, group):
        values = []
        for pair in range(width // 2):
            both = widened(builder, emit_codes(builder, codes, LANES * pair), signed=False)
            values += [builder.and_(both, constants(_CODE)), builder.lshr(both, constants(_CODE_BITS))]
        return [as_floats(builder, builder.sub(value, zero)) for value, zero in zip(values, group, strict=True)]


_way = way_through(_Int4())


@task
def _panels(a):
    _way(a)


def bind_int4(weight: Int4Weight, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """→ a function [T, K] → [T, N], like its input: x Wᵀ + bias; it keeps no reference to `weight` but to its permutation."""
    permutation, codes = weight.permutation, _paired(in_panels(_codes(weight)))
    multiply = bind(_panels, codes, _entries(weight), bias, weight.num_columns, group_size=weight.group_size)
    return multiply if permutation is None else lambda x: multiply(x.index_select(1, permutation))


def _codes(weight: Int4Weight) -> torch.Tensor:
    """→ [N, K] uint8, columns sorted by group, see `Int4Weight`"""
    num_chunks, num_outputs, num_words = weight.words.shape
    codes = torch.empty(num_outputs, num_chunks, CHUNK_RUNS, num_words, dtype=torch.uint8)
    for run in range(CHUNK_RUNS):
        codes[:, :, run] = weight.words.bitwise_right_shift(_CODE_BITS * run).bitwise_and_(_CODE).transpose(0, 1)
    return codes.view(num_outputs, -1)[:, : weight.num_columns]


def _paired(panels: torch.Tensor) -> torch.Tensor:
    """[panels, PANEL, K] → [panels, K, PANEL / 2]: the codes of two neighbouring vectors in a byte, the first one lower"""
    vectors = panels.view(len(panels), PANEL_VECTORS // 2, 2, LANES, -1)
    pairs = vectors[:, :, 0] | vectors[:, :, 1] << _CODE_BITS
    return pairs.flatten(1, 2).transpose(1, 2).contiguous()


def _entries(weight: Int4Weight) -> torch.Tensor:
    """→ [N, groups] int32"""
    num_groups = -(-weight.num_columns // weight.group_size)
    stored = weight.scales_zeros[:num_groups].T
    scales = stored.bitwise_and(0xFFFF).to(torch.int16).view(weight.scale_dtype).float()
    return scales.view(torch.int32) | stored.bitwise_right_shift(16)
