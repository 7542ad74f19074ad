"""Tiles of products with weights in codes of 8 or 4 bits, which are decoded in registers and then multiplied.

A format says how the codes of a column become vectors of weights, up to a factor per output; the tile around it is the same for
all formats. A sum runs over its columns in order, one fused multiply-add after the other, whatever other rows are computed at
the same time. A tile may store the decoded weights: with them as its panel, `tiles.multiply` gives other rows the same sums.
So a row has the same bits in any batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.simd.tiles import (
    ROWS,
    TILE_VECTORS,
    emit_count_switch,
    emit_load_accumulators,
    emit_prefetch,
    emit_store_accumulators,
)
from kernels.simd.vectors import (
    BYTES,
    INT32,
    INT64,
    INTEGERS,
    LANES,
    VECTOR,
    element_pointer,
    emit_fma,
    emit_splat,
    emit_store,
)

PANEL_VECTORS = 2 * TILE_VECTORS
"""Vectors side by side in a panel. Few rows use all of them, so that their sums do not wait for each other; more rows use one
half after the other, as many as registers hold."""

PANEL = PANEL_VECTORS * LANES

BYTE = ir.IntType(8)
CODES = ir.VectorType(BYTE, LANES)


class Format(ABC):
    """The layout of codes in a panel (`column_bytes` per column, the codes of each half contiguous) and their decoding."""

    column_bytes: int
    shared_decode_rows_min: int = 4 * ROWS
    """The measured number of rows from which it is faster if the first tile stores the columns it decodes for the others."""

    @abstractmethod
    def emit_decode(self, builder: Any, codes: Any, width: int, group: Sequence[Any]) -> list[Any]:
        """The first `width` vectors of the column whose codes begin at the address `codes`."""

    def emit_group(self, builder: Any, entry: Any, width: int) -> Sequence[Any]:
        """Parameters of `emit_decode` for a group of columns; `entry` is the address of its entry, four bytes per output."""
        return ()


def emit_load_codes(builder, address, index):
    """LANES bytes from byte `index` on, not decoded."""
    pointer = builder.bitcast(element_pointer(builder, address, INT64(index), BYTE), CODES.as_pointer())
    return builder.load(pointer, align=1)


def integer_constant(value: int) -> ir.Constant:
    """An integer in all lanes."""
    return ir.Constant(INTEGERS, [value] * LANES)


class _Operands(NamedTuple):
    """The inputs and outputs of a tile, see `make_tile`: LLVM values."""

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
    prefetch_address: Any
    decoded: Any


def _emit_tile(builder, weight_format: Format, rows: int, width: int, operands: _Operands, *, stores_decoded: bool) -> None:
    """c[r] = start[r] + Σ_k a[r, k] · decoded(codes[k]) for `rows` rows of `width` vectors."""
    a, a_stride, codes, first, end, groups, group_size, start, start_stride, c, c_stride, prefetch_address, decoded = operands
    row_pointers = [element_pointer(builder, a, builder.mul(a_stride, INT64(row))) for row in range(rows)]
    accumulators = emit_load_accumulators(builder, start, start_stride, rows, width)
    prefetch_step = INT64(weight_format.column_bytes * width // PANEL_VECTORS)
    first_group = builder.sdiv(first, group_size)
    first_group_start = builder.mul(first_group, group_size)
    with cgutils.for_range_slice(builder, first_group_start, end, group_size, intp=INT64) as (group_start, index):
        group_end = _emit_min(builder, builder.add(group_start, group_size), end)
        group_start = builder.select(builder.icmp_signed("<", group_start, first), first, group_start)
        entry = builder.mul(builder.add(first_group, index), INT64(PANEL * BYTES))
        group = weight_format.emit_group(builder, builder.add(groups, entry), width)
        with cgutils.for_range_slice(builder, group_start, group_end, _emit_opaque_one(builder), intp=INT64) as (column, _):
            values = weight_format.emit_decode(
                builder, builder.add(codes, builder.mul(column, INT64(weight_format.column_bytes))), width, group
            )
            emit_prefetch(builder, builder.add(prefetch_address, builder.mul(column, prefetch_step)))
            for i, value in enumerate(values if stores_decoded else ()):
                emit_store(builder, decoded, builder.add(builder.mul(column, INT64(width * LANES)), INT64(i * LANES)), value)
            for row in range(rows):
                factor = emit_splat(builder, builder.load(builder.gep(row_pointers[row], [column]), align=BYTES))
                for value, pointer in zip(values, accumulators[row], strict=True):
                    builder.store(emit_fma(builder, factor, value, builder.load(pointer)), pointer)
    emit_store_accumulators(builder, c, c_stride, accumulators)


def _emit_opaque_one(builder):
    """The step of a loop, hidden from LLVM so that it cannot unroll: two columns of a tile at once exceed the registers, and 8
    rows in 4 bits take a quarter longer."""
    return builder.asm(ir.FunctionType(INT64, [INT64]), "", "=r,0", [INT64(1)], True)


def _emit_min(builder, x, y):
    return builder.select(builder.icmp_signed("<", x, y), x, y)


def make_tile(
    weight_format: Format, width: int, max_rows: int, *, min_rows: int = 1, stores_decoded: bool = False
) -> Callable[..., None]:
    """A function for tiles of this format: (rows, a, a_stride, codes, first, end, groups, group_size, start, start_stride, c,
    c_stride, prefetch_address, decoded):

    c[r] = start[r] + Σ_k a[r, k] · decoded(codes[k]) for `min_rows` to `max_rows` rows of `width` vectors, first ≤ k < end.
    Addresses are in bytes, strides and sizes in elements. a, codes, groups, prefetch_address and decoded are the addresses of
    column 0; codes and groups those of a panel or of half a panel. From `prefetch_address` on, as many bytes are prefetched as
    are read of the codes. With `stores_decoded`, decoded(codes[k]) is written to `decoded`, `width` vectors for each k.
    """

    @intrinsic
    def tiles(
        typing, rows, a, a_stride, codes, first, end, groups, group_size, start, start_stride, c, c_stride,
        prefetch_address, decoded,
    ):  # fmt: skip
        def emit(context, builder, sig, args):
            def emit_rows(rows):
                _emit_tile(builder, weight_format, rows, width, _Operands(*args[1:]), stores_decoded=stores_decoded)

            emit_count_switch(builder, args[0], max_rows, emit_rows, min_count=min_rows)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 14), emit

    function: Callable[..., None] = tiles
    return function


def emit_widen(builder, codes, *, signed: bool):
    """Bytes as integers of 32 bits."""
    return builder.sext(codes, INTEGERS) if signed else builder.zext(codes, INTEGERS)


def emit_to_float(builder, integers):
    """Integers as float32."""
    return builder.sitofp(integers, VECTOR)


def emit_bits_as_float(builder, integers):
    """The float32 values with these bits."""
    return builder.bitcast(integers, VECTOR)


def emit_load_integers(builder, address, index):
    """LANES integers of 32 bits from element `index` on."""
    pointer = builder.bitcast(element_pointer(builder, address, INT64(index), INT32), INTEGERS.as_pointer())
    return builder.load(pointer, align=BYTES)
