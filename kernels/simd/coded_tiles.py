"""Tiles of products with weights that are codes of 8 or 4 bits, decoded in registers: x Wᵀ + bias.

Columns come in groups, one or more, and each output has a scale in each of them. A format is how the codes of a column become
vectors that are the weights but for these scales; the tile around it is the same for all. The sum of a group runs over its
columns in order, one fused multiplication and addition after the other, and is added with its scale to the ones before,
whatever other rows are computed beside it. So a row has the same bits in any batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.simd.tiles import ROWS, WIDE, prefetch
from kernels.simd.vectors import (
    BYTES,
    INT32,
    INT64,
    INTEGERS,
    LANES,
    VECTOR,
    ZEROS,
    emit_fma,
    emit_load,
    emit_splat,
    emit_store_part,
    place,
)

PANEL_VECTORS = 2 * WIDE
"""Vectors that stand side by side in a panel. Few rows take all of them, so that their sums do not wait for each other; more
rows take one half after the other, as many as registers hold."""

PANEL = PANEL_VECTORS * LANES
FEW_ROWS = ROWS // 2

BYTE = ir.IntType(8)
CODES = ir.VectorType(BYTE, LANES)


class Format(ABC):
    """How codes lie in a panel: `column_bytes` for one column, those of each half together."""

    column_bytes: int

    @abstractmethod
    def decode(self, builder: Any, codes: Any, width: int, group: Sequence[Any]) -> list[Any]:
        """The first `width` vectors of the column whose codes begin at the address `codes`, but for their scales."""

    def group(self, builder: Any, entry: Any, width: int) -> tuple[list[Any], list[Any]]:
        """The scales of a group whose entry, four bytes for each output, is at an address, and what `decode` is told of it."""
        return [emit_load(builder, entry, INT64(LANES * i)) for i in range(width)], []


def emit_codes(builder, address, index):
    """LANES bytes from byte `index` on, as they are."""
    pointer = builder.bitcast(place(builder, address, INT64(index), BYTE), CODES.as_pointer())
    return builder.load(pointer, align=1)


def constants(value: int) -> ir.Constant:
    """A whole number in all lanes."""
    return ir.Constant(INTEGERS, [value] * LANES)


class _Operands(NamedTuple):
    """What a tile reads and writes, see `tiles_of`; values of LLVM."""

    a: Any
    a_stride: Any
    length: Any
    group_size: Any
    panel: Any
    ahead: Any
    groups: Any
    bias: Any
    out: Any
    out_stride: Any
    count: Any

    def half(self, builder: Any, number: Any, column_bytes: int) -> _Operands:
        """Those of a half of the panel, number 0 or 1."""

        def behind(address: Any, num_bytes: int) -> Any:
            return builder.add(address, builder.mul(number, INT64(num_bytes)))

        outputs = WIDE * LANES
        panel_bytes = builder.mul(self.length, INT64(column_bytes // 2))
        return self._replace(
            panel=behind(self.panel, column_bytes // 2),
            ahead=builder.add(self.ahead, builder.mul(number, panel_bytes)),
            groups=behind(self.groups, outputs * BYTES),
            bias=behind(self.bias, outputs * BYTES),
            out=behind(self.out, outputs * BYTES),
            count=behind(self.count, -outputs),
        )


def _emit_tile(builder, form: Format, rows: int, width: int, operands: _Operands) -> None:
    """out[r] = Σ_groups scales · Σ_k a[r, k] · decoded(panel[k]) + bias for `rows` rows of `width` vectors."""
    row_places = [place(builder, operands.a, builder.mul(operands.a_stride, INT64(row))) for row in range(rows)]
    addends = [emit_load(builder, operands.bias, INT64(LANES * i)) for i in range(width)]
    totals = [[cgutils.alloca_once_value(builder, addend) for addend in addends] for _ in range(rows)]
    sums = [[cgutils.alloca_once(builder, VECTOR) for _ in range(width)] for _ in range(rows)]
    ahead_step = INT64(form.column_bytes * width // PANEL_VECTORS)
    with cgutils.for_range_slice(builder, INT64(0), operands.length, operands.group_size, intp=INT64) as (first, number):
        end = builder.add(first, operands.group_size)
        end = builder.select(builder.icmp_signed("<", end, operands.length), end, operands.length)
        entry = builder.add(operands.groups, builder.mul(number, INT64(PANEL * BYTES)))
        scales, group = form.group(builder, entry, width)
        for pointer in chain(*sums):
            builder.store(ZEROS, pointer)
        with cgutils.for_range_slice(builder, first, end, INT64(1), intp=INT64) as (column, _):
            codes = builder.add(operands.panel, builder.mul(column, INT64(form.column_bytes)))
            values = form.decode(builder, codes, width, group)
            prefetch(builder, builder.add(operands.ahead, builder.mul(column, ahead_step)), 0)
            for row in range(rows):
                factor = emit_splat(builder, builder.load(builder.gep(row_places[row], [column]), align=BYTES))
                for value, pointer in zip(values, sums[row], strict=True):
                    builder.store(emit_fma(builder, factor, value, builder.load(pointer)), pointer)
        for total, pointer, scale in zip(chain(*totals), chain(*sums), scales * rows, strict=True):
            builder.store(emit_fma(builder, builder.load(pointer), scale, builder.load(total)), total)
    for row in range(rows):
        start = builder.mul(operands.out_stride, INT64(row))
        end = builder.add(start, operands.count)
        for i, total in enumerate(totals[row]):
            emit_store_part(builder, operands.out, builder.add(start, INT64(LANES * i)), end, builder.load(total))


def tiles_of(form: Format) -> Callable[..., None]:
    """Of a format, the function (rows, a, a_stride, length, group_size, panel, ahead, groups, bias, out, out_stride, count):

    out[r] = Σ_groups scales · Σ_k a[r, k] · decoded(panel[k]) + bias for 1 to ROWS rows and k below `length`. Addresses are in
    bytes, strides and sizes in elements; of a panel's outputs the first `count` are written. Meanwhile as much as a panel has
    is fetched to the cache from `ahead` on.
    """

    @intrinsic
    def tiles(typing, rows, a, a_stride, length, group_size, panel, ahead, groups, bias, out, out_stride, count):
        def emit(context, builder, sig, args):
            behind = builder.append_basic_block("behind")
            choice = builder.switch(args[0], behind)
            operands = _Operands(*args[1:])
            for rows in range(1, ROWS + 1):
                block = builder.append_basic_block(f"rows_{rows}")
                choice.add_case(INT64(rows), block)
                builder.position_at_end(block)
                if rows <= FEW_ROWS:
                    _emit_tile(builder, form, rows, PANEL_VECTORS, operands)
                else:
                    with cgutils.for_range(builder, INT64(2)) as loop:
                        half = operands.half(builder, loop.index, form.column_bytes)
                        _emit_tile(builder, form, rows, WIDE, half)
                builder.branch(behind)
            builder.position_at_end(behind)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 12), emit

    function: Callable[..., None] = tiles
    return function


def widened(builder, codes, *, signed: bool):
    """Bytes as whole numbers of 32 bits."""
    return builder.sext(codes, INTEGERS) if signed else builder.zext(codes, INTEGERS)


def as_floats(builder, integers):
    """Whole numbers as float32."""
    return builder.sitofp(integers, VECTOR)


def as_bits(builder, integers):
    """The numbers that have these bits."""
    return builder.bitcast(integers, VECTOR)


def load_integers(builder, address, index):
    """LANES whole numbers of 32 bits from element `index` on."""
    pointer = builder.bitcast(place(builder, address, INT64(index), INT32), INTEGERS.as_pointer())
    return builder.load(pointer, align=BYTES)
