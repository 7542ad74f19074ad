"""Tiles of products that stay in registers, for matrix products and attention.

Each sum runs over its terms in order, one fused multiply-add after the other, whatever other rows and columns are computed at
the same time. So a row has the same bits in any batch.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.simd.vectors import (
    BYTES,
    INT32,
    INT64,
    INTEGERS,
    LANES,
    VECTOR,
    ZEROS,
    emit_call,
    emit_fma,
    emit_load,
    emit_splat,
    emit_store,
    place,
)

ROWS = 4 if LANES == 8 else 8
"""Rows of the largest tile: with WIDE vectors in each, registers are left for the operands. AVX2 has 16, the others 32."""

WIDE = 2
"""Vectors of a tile's row. A processor that starts two products per cycle, each taking four cycles, needs eight to be busy."""

WIDEST = 3 if LANES == 16 else WIDE
"""Vectors in a row of a tile that leaves three of 32 registers for operands. It needs the fewest instructions per product, 1.5
instead of 2, which matters on a core shared with another thread."""

CACHE_LINE = 64


def _emit_tile(builder, rows, width, arguments, *, fetches):
    """c[r] = start[r] + Σ_k a[r, k] · b[k] for `rows` rows of `width` vectors."""
    a, a_stride, b, b_stride, length, start, start_stride, c, c_stride, *ahead = arguments
    row_places = [place(builder, a, builder.mul(a_stride, INT64(row))) for row in range(rows)]
    sums = begin_sums(builder, start, start_stride, rows, width)
    with cgutils.for_range(builder, length) as loop:
        column = builder.mul(loop.index, b_stride)
        values = [emit_load(builder, b, builder.add(column, INT64(LANES * i))) for i in range(width)]
        if fetches:
            prefetch(builder, builder.add(ahead[0], builder.mul(loop.index, INT64(CACHE_LINE))))
        for row in range(rows):
            factor = emit_splat(builder, builder.load(builder.gep(row_places[row], [loop.index]), align=BYTES))
            for i in range(width):
                builder.store(emit_fma(builder, factor, values[i], builder.load(sums[row][i])), sums[row][i])
    store_sums(builder, c, c_stride, sums)


def begin_sums(builder, start, stride, rows, width):
    """The variables of `rows` rows of `width` vectors, initialised from memory at `start`."""
    sums = []
    for row in range(rows):
        first = builder.mul(stride, INT64(row))
        values = [emit_load(builder, start, builder.add(first, INT64(LANES * i))) for i in range(width)]
        sums.append([cgutils.alloca_once_value(builder, value) for value in values])
    return sums


def store_sums(builder, target, stride, sums) -> None:
    """Write the variables of `begin_sums`."""
    for row, pointers in enumerate(sums):
        first = builder.mul(stride, INT64(row))
        for i, pointer in enumerate(pointers):
            emit_store(builder, target, builder.add(first, INT64(LANES * i)), builder.load(pointer))


def for_each_count(builder, count, most, emit, *, fewest=1) -> None:
    """Emit code that runs what `emit(n)` emits if `count` is n, for n from `fewest` to `most`."""
    behind = builder.append_basic_block("behind")
    choice = builder.switch(count, behind)
    for number in range(fewest, most + 1):
        block = builder.append_basic_block(f"count_{number}")
        choice.add_case(INT64(number), block)
        builder.position_at_end(block)
        emit(number)
        builder.branch(behind)
    builder.position_at_end(behind)


def prefetch(builder, address) -> None:
    """Prefetch the cache line at an address."""
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    emit_call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, INT32(0), INT32(2), INT32(1)])


def _tiles(width, *, fetches=False):
    """A function that chooses the tile for its number of rows, 1 to ROWS; if it `fetches`, each step prefetches a line."""

    @intrinsic
    def tiles(typing, rows, a, a_stride, b, b_stride, length, start, start_stride, c, c_stride, ahead):
        def emit(context, builder, sig, args):
            for_each_count(builder, args[0], ROWS, lambda rows: _emit_tile(builder, rows, width, args[1:], fetches=fetches))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 11), emit

    return tiles


multiply = _tiles(WIDE)
"""(rows, a, a_stride, b, b_stride, length, start, start_stride, c, c_stride, 0): c[r] = start[r] + Σ_k a[r, k] · b[k] for 1 to
ROWS rows of WIDE vectors and k below `length`. a, b, start and c are addresses in bytes, strides count elements."""

multiply_narrow = _tiles(1)
"""As `multiply`, for rows of one vector."""

multiply_fetching = _tiles(WIDE, fetches=True)
"""As `multiply`, while each step prefetches a line, the first from the address in the last argument."""

multiply_widest = _tiles(WIDEST)
"""As `multiply`, for rows of WIDEST vectors."""

multiply_widest_fetching = _tiles(WIDEST, fetches=True)
"""As `multiply_fetching`, for rows of WIDEST vectors."""


DOT_QUERIES = 2
"""Queries of `dots` at a time."""

_DOT_KEYS = LANES // 2
"""Keys whose sums are computed together in `dots`: with DOT_QUERIES, registers are left for the operands."""


@intrinsic
def dots(typing, rows, queries, keys, key_stride, count, size, out, out_stride):
    """Products of 1 to DOT_QUERIES contiguous queries with LANES keys. The first `count` keys are read; the others repeat the
    last of these. Row r goes to `out` + r · `out_stride`.

    `size` numbers each, a multiple of LANES; strides in elements. A key is read once for all queries. Partial sums of LANES
    keys are added up crosswise: four rounds of pairs for 16 keys, instead of 16 sums over 16 lanes.
    """

    def emit(context, builder, sig, args):
        rows, queries, keys, key_stride, count, *others = args

        def emit_rows(kept):
            for_each_count(
                builder, rows, DOT_QUERIES, lambda number: _emit_dots(builder, number, queries, keys, key_stride, kept, *others)
            )

        with builder.if_else(builder.icmp_signed("<", count, INT64(LANES))) as (some, all_of_them):
            with some:
                emit_rows(_kept_keys(builder, count))
            with all_of_them:  # fixed places take a tenth less of a decode's time
                emit_rows([INT64(key) for key in range(LANES)])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), emit


def _emit_dots(builder, rows, queries, keys, key_stride, kept, size, out, out_stride):
    firsts = [builder.mul(size, INT64(row)) for row in range(rows)]
    found: list[list[Any]] = [[] for _ in range(rows)]
    for first_key in range(0, LANES, _DOT_KEYS):
        places = [builder.mul(key_stride, key) for key in kept[first_key : first_key + _DOT_KEYS]]
        sums = [[cgutils.alloca_once_value(builder, ZEROS) for _ in places] for _ in range(rows)]
        with cgutils.for_range_slice(builder, INT64(0), size, INT64(LANES), intp=INT64) as (index, _):
            values = [emit_load(builder, queries, builder.add(first, index)) for first in firsts]
            for key, place_of in enumerate(places):
                numbers = emit_load(builder, keys, builder.add(place_of, index))
                for value, of_row in zip(values, sums, strict=True):
                    builder.store(emit_fma(builder, value, numbers, builder.load(of_row[key])), of_row[key])
        for of_row, row in zip(sums, found, strict=True):
            row.append(_crosswise(builder, [builder.load(each) for each in of_row], 1))
    for number, halves in enumerate(found):
        emit_store(builder, out, builder.mul(out_stride, INT64(number)), _crosswise(builder, halves, _DOT_KEYS))


DOT_ROWS = 4 if LANES == 16 else 2
"""Rows of `dots_of_rows` at a time. Each holds as many vectors as its tree of sums is deep, plus one."""


@intrinsic
def turn(typing, keys, key_stride, count, size, turned):
    """Transpose LANES keys, of which the first `count` are read as by `dots`: [size, LANES] at `turned`, number i of all keys
    in row i."""

    def emit(context, builder, sig, args):
        keys, key_stride, count, size, turned = args
        firsts = [builder.mul(key_stride, key) for key in _kept_keys(builder, count)]
        with cgutils.for_range_slice(builder, INT64(0), size, INT64(LANES), intp=INT64) as (index, _):
            vectors = [emit_load(builder, keys, builder.add(first, index)) for first in firsts]
            for lane, vector in enumerate(_transposed(builder, vectors)):
                place_of = builder.mul(builder.add(index, INT64(lane)), INT64(LANES))
                emit_store(builder, turned, place_of, vector)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), emit


@intrinsic
def dots_of_rows(typing, rows, queries, size, turned, out, out_stride):
    """The sums of `dots` for 1 to DOT_ROWS contiguous queries with keys transposed by `turn`, in the same order, lane by lane.
    Row r goes to `out` + r · `out_stride`."""

    def emit(context, builder, sig, args):
        for_each_count(builder, args[0], DOT_ROWS, lambda rows: _emit_dots_of_rows(builder, rows, *args[1:]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), emit


def _emit_dots_of_rows(builder, rows, queries, size, turned, out, out_stride):
    """Partial sum l of a query is over its numbers l, l + LANES, …; a tree adds neighbours first, like `_crosswise`."""
    firsts = [builder.mul(size, INT64(row)) for row in range(rows)]
    sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(rows)]
    trees: list[list[Any]] = [[] for _ in range(rows)]
    for lane in range(LANES):
        for pointer in sums:
            builder.store(ZEROS, pointer)
        with cgutils.for_range_slice(builder, INT64(lane), size, INT64(LANES), intp=INT64) as (index, _):
            keys = emit_load(builder, turned, builder.mul(index, INT64(LANES)))
            for first, pointer in zip(firsts, sums, strict=True):
                factor = emit_splat(builder, builder.load(place(builder, queries, builder.add(first, index)), align=BYTES))
                builder.store(emit_fma(builder, factor, keys, builder.load(pointer)), pointer)
        for tree, pointer in zip(trees, sums, strict=True):
            value, filled = builder.load(pointer), lane
            while filled % 2:
                value, filled = builder.fadd(tree.pop(), value), filled // 2
            tree.append(value)
    for row, (total,) in enumerate(trees):
        emit_store(builder, out, builder.mul(out_stride, INT64(row)), total)


def _transposed(builder, vectors):
    """Vector i of the result has lane i of each vector."""
    distance = 1
    while distance < LANES:
        kept = [lane if not lane & distance else LANES + lane - distance for lane in range(LANES)]
        moved = [lane + distance if not lane & distance else LANES + lane for lane in range(LANES)]
        swapped = list(vectors)
        for index in range(LANES):
            if not index & distance:
                pair = vectors[index], vectors[index + distance]
                swapped[index] = builder.shuffle_vector(*pair, ir.Constant(INTEGERS, kept))
                swapped[index + distance] = builder.shuffle_vector(*pair, ir.Constant(INTEGERS, moved))
        vectors = swapped
        distance *= 2
    return vectors


def _kept_keys(builder, count):
    """Which of LANES keys are read: after the first `count`, the last of these is repeated."""
    last = builder.sub(count, INT64(1))
    return [builder.select(builder.icmp_signed("<", INT64(key), last), INT64(key), last) for key in range(LANES)]


def _crosswise(builder, vectors, distance):
    """Vectors of sums whose lanes hold `distance` keys each, side by side, added in pairs until one is left."""
    while len(vectors) > 1:
        low = [lane + (LANES - distance if lane & distance else 0) for lane in range(LANES)]
        high = [lane + (LANES if lane & distance else distance) for lane in range(LANES)]
        vectors = [
            builder.fadd(
                builder.shuffle_vector(first, second, ir.Constant(INTEGERS, low)),
                builder.shuffle_vector(first, second, ir.Constant(INTEGERS, high)),
            )
            for first, second in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        distance *= 2
    return vectors[0]
