"""Tiles of products with weights that are codes of 8 or 4 bits, decoded in registers before they are multiplied.

A format says how the codes of a column become vectors of weights, up to a factor per output; the tile around it is the same for
all formats. A sum runs over its columns in order, one fused multiply-add after the other, whatever other rows are computed at
the same time. A tile may keep the decoded weights: with them as its panel `tiles.multiply` gives other rows the same sums. So a
row has the same bits in any batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.simd.tiles import ROWS, WIDE, begin_sums, for_each_count, prefetch, store_sums
from kernels.simd.vectors import (
    BYTES,
    INT32,
    INT64,
    INTEGERS,
    LANES,
    VECTOR,
    emit_fma,
    emit_splat,
    emit_store,
    place,
)

PANEL_VECTORS = 2 * WIDE
"""Vectors side by side in a panel. Few rows use all of them, so that their sums do not wait for each other; more rows use one
half after the other, as many as registers hold."""

PANEL = PANEL_VECTORS * LANES

BYTE = ir.IntType(8)
CODES = ir.VectorType(BYTE, LANES)


class Format(ABC):
    """The layout of codes in a panel (`column_bytes` per column, the codes of each half contiguous) and their decoding."""

    column_bytes: int
    many_rows: int = 4 * ROWS
    """The measured number of rows from which it is faster that the first tile keeps the columns it decodes."""

    @abstractmethod
    def decode(self, builder: Any, codes: Any, width: int, group: Sequence[Any]) -> list[Any]:
        """The first `width` vectors of the column whose codes begin at the address `codes`."""

    def group(self, builder: Any, entry: Any, width: int) -> Sequence[Any]:
        """Arguments for `decode` that hold for a group of columns; `entry` is the address of its entry, four bytes per
        output."""
        return ()


def emit_codes(builder, address, index):
    """LANES bytes from byte `index` on, not decoded."""
    pointer = builder.bitcast(place(builder, address, INT64(index), BYTE), CODES.as_pointer())
    return builder.load(pointer, align=1)


def constants(value: int) -> ir.Constant:
    """An integer in all lanes."""
    return ir.Constant(INTEGERS, [value] * LANES)


class _Operands(NamedTuple):
    """The inputs and outputs of a tile, see `tiles_of`; values of LLVM."""

    a: Any
    a_stride: Any
    codes: Any
    first: Any
    end: Any
    groups: Any
    group_size: Any
    start: Any
    start_stride: Any
    c: Any
    c_stride: Any
    ahead: Any
    kept: Any


def _emit_tile(builder, form: Format, rows: int, width: int, operands: _Operands, *, keeps: bool) -> None:
    """c[r] = start[r] + Σ_k a[r, k] · decoded(codes[k]) for `rows` rows of `width` vectors."""
    a, a_stride, codes, first, end, groups, group_size, start, start_stride, c, c_stride, ahead, kept = operands
    row_places = [place(builder, a, builder.mul(a_stride, INT64(row))) for row in range(rows)]
    sums = begin_sums(builder, start, start_stride, rows, width)
    ahead_step = INT64(form.column_bytes * width // PANEL_VECTORS)
    first_group = builder.sdiv(first, group_size)
    from_group = builder.mul(first_group, group_size)
    with cgutils.for_range_slice(builder, from_group, end, group_size, intp=INT64) as (group_first, number):
        group_end = _smaller(builder, builder.add(group_first, group_size), end)
        group_first = builder.select(builder.icmp_signed("<", group_first, first), first, group_first)
        entry = builder.mul(builder.add(first_group, number), INT64(PANEL * BYTES))
        group = form.group(builder, builder.add(groups, entry), width)
        with cgutils.for_range_slice(builder, group_first, group_end, _one(builder), intp=INT64) as (column, _):
            values = form.decode(builder, builder.add(codes, builder.mul(column, INT64(form.column_bytes))), width, group)
            prefetch(builder, builder.add(ahead, builder.mul(column, ahead_step)))
            for i, value in enumerate(values if keeps else ()):
                emit_store(builder, kept, builder.add(builder.mul(column, INT64(width * LANES)), INT64(i * LANES)), value)
            for row in range(rows):
                factor = emit_splat(builder, builder.load(builder.gep(row_places[row], [column]), align=BYTES))
                for value, pointer in zip(values, sums[row], strict=True):
                    builder.store(emit_fma(builder, factor, value, builder.load(pointer)), pointer)
    store_sums(builder, c, c_stride, sums)


def _one(builder):
    """The step of a loop, hidden from LLVM so that it cannot unroll: two columns of a tile at once exceed the registers, and 8
    rows in 4 bits take a quarter longer."""
    return builder.asm(ir.FunctionType(INT64, [INT64]), "", "=r,0", [INT64(1)], True)


def _smaller(builder, x, y):
    return builder.select(builder.icmp_signed("<", x, y), x, y)


def tiles_of(form: Format, width: int, most_rows: int, *, fewest_rows: int = 1, keeps: bool = False) -> Callable[..., None]:
    """A function for tiles of this format: (rows, a, a_stride, codes, first, end, groups, group_size, start, start_stride, c,
    c_stride, ahead, kept):

    c[r] = start[r] + Σ_k a[r, k] · decoded(codes[k]) for `fewest_rows` to `most_rows` rows of `width` vectors, first ≤ k < end.
    Addresses are in bytes, strides and sizes in elements. a, codes, groups, ahead and kept are the addresses of column 0; codes
    and groups those of a panel or of half a panel. From `ahead` on, as many bytes are prefetched as are read of the codes. With
    `keeps`, decoded(codes[k]) is written to `kept`, `width` vectors for each k.
    """

    @intrinsic
    def tiles(typing, rows, a, a_stride, codes, first, end, groups, group_size, start, start_stride, c, c_stride, ahead, kept):
        def emit(context, builder, sig, args):
            def emit_rows(rows):
                _emit_tile(builder, form, rows, width, _Operands(*args[1:]), keeps=keeps)

            for_each_count(builder, args[0], most_rows, emit_rows, fewest=fewest_rows)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 14), emit

    function: Callable[..., None] = tiles
    return function


def widened(builder, codes, *, signed: bool):
    """Bytes as integers of 32 bits."""
    return builder.sext(codes, INTEGERS) if signed else builder.zext(codes, INTEGERS)


def as_floats(builder, integers):
    """Integers as float32."""
    return builder.sitofp(integers, VECTOR)


def as_bits(builder, integers):
    """The float32 numbers with these bits."""
    return builder.bitcast(integers, VECTOR)


def load_integers(builder, address, index):
    """LANES integers of 32 bits from element `index` on."""
    pointer = builder.bitcast(place(builder, address, INT64(index), INT32), INTEGERS.as_pointer())
    return builder.load(pointer, align=BYTES)
