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
    element_pointer,
    emit_call,
    emit_fma,
    emit_load,
    emit_splat,
    emit_store,
)

ROWS = 4 if LANES == 8 else 8
"""Rows of the largest tile: with TILE_VECTORS vectors in each, registers are left for the operands. AVX2 has 16, the others
32."""

TILE_VECTORS = 2
"""Vectors of a tile's row. A processor that starts two products per cycle, each taking four cycles, needs eight to be busy."""

WIDE_TILE_VECTORS = 3 if LANES == 16 else TILE_VECTORS
"""Vectors in a row of a tile that leaves three of 32 registers for operands. It needs the fewest instructions per product, 1.5
instead of 2, which matters on a core shared with another thread."""

CACHE_LINE = 64


def _emit_tile(builder, rows, width, operands, *, prefetches):
    """c[r] = start[r] + Σ_k a[r, k] · b[k] for `rows` rows of `width` vectors."""
    a, a_stride, b, b_stride, length, start, start_stride, c, c_stride, *prefetch_address = operands
    row_pointers = [element_pointer(builder, a, builder.mul(a_stride, INT64(row))) for row in range(rows)]
    accumulators = emit_load_accumulators(builder, start, start_stride, rows, width)
    with cgutils.for_range(builder, length) as loop:
        b_index = builder.mul(loop.index, b_stride)
        values = [emit_load(builder, b, builder.add(b_index, INT64(LANES * i))) for i in range(width)]
        if prefetches:
            emit_prefetch(builder, builder.add(prefetch_address[0], builder.mul(loop.index, INT64(CACHE_LINE))))
        for row in range(rows):
            factor = emit_splat(builder, builder.load(builder.gep(row_pointers[row], [loop.index]), align=BYTES))
            for i in range(width):
                builder.store(emit_fma(builder, factor, values[i], builder.load(accumulators[row][i])), accumulators[row][i])
    emit_store_accumulators(builder, c, c_stride, accumulators)


def emit_load_accumulators(builder, start, stride, rows, width):
    """The variables of `rows` rows of `width` vectors, initialised from memory at `start`."""
    accumulators = []
    for row in range(rows):
        index = builder.mul(stride, INT64(row))
        values = [emit_load(builder, start, builder.add(index, INT64(LANES * i))) for i in range(width)]
        accumulators.append([cgutils.alloca_once_value(builder, value) for value in values])
    return accumulators


def emit_store_accumulators(builder, target, stride, accumulators) -> None:
    """Write the variables of `emit_load_accumulators`."""
    for row, pointers in enumerate(accumulators):
        index = builder.mul(stride, INT64(row))
        for i, pointer in enumerate(pointers):
            emit_store(builder, target, builder.add(index, INT64(LANES * i)), builder.load(pointer))


def emit_count_switch(builder, count, max_count, emit, *, min_count=1) -> None:
    """Emit code that runs what `emit(n)` emits if `count` is n, for n from `min_count` to `max_count`."""
    after = builder.append_basic_block("after")
    switch = builder.switch(count, after)
    for number in range(min_count, max_count + 1):
        block = builder.append_basic_block(f"count_{number}")
        switch.add_case(INT64(number), block)
        builder.position_at_end(block)
        emit(number)
        builder.branch(after)
    builder.position_at_end(after)


def emit_prefetch(builder, address) -> None:
    """Prefetch the cache line at an address."""
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    emit_call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, INT32(0), INT32(2), INT32(1)])


def _make_multiply(width, *, prefetches=False):
    """A function that chooses the tile for its number of rows, 1 to ROWS; if it `prefetches`, each step prefetches a line."""

    @intrinsic
    def tiles(typing, rows, a, a_stride, b, b_stride, length, start, start_stride, c, c_stride, prefetch_address):
        def emit(context, builder, sig, args):
            emit_count_switch(
                builder, args[0], ROWS, lambda rows: _emit_tile(builder, rows, width, args[1:], prefetches=prefetches)
            )
            return context.get_dummy_value()

        return types.void(*[types.int64] * 11), emit

    return tiles


multiply = _make_multiply(TILE_VECTORS)
"""(rows, a, a_stride, b, b_stride, length, start, start_stride, c, c_stride, 0): c[r] = start[r] + Σ_k a[r, k] · b[k] for 1 to
ROWS rows of TILE_VECTORS vectors and k below `length`. a, b, start and c are addresses in bytes, strides count elements."""

multiply_narrow = _make_multiply(1)
"""As `multiply`, for rows of one vector."""

multiply_prefetching = _make_multiply(TILE_VECTORS, prefetches=True)
"""As `multiply`, while each step prefetches a line, the first from the address in the last argument."""

multiply_wide = _make_multiply(WIDE_TILE_VECTORS)
"""As `multiply`, for rows of WIDE_TILE_VECTORS vectors."""

multiply_wide_prefetching = _make_multiply(WIDE_TILE_VECTORS, prefetches=True)
"""As `multiply_prefetching`, for rows of WIDE_TILE_VECTORS vectors."""


DOT_QUERIES = 2
"""Queries that `dots` processes at a time."""

_DOT_KEYS = LANES // 2
"""Keys whose sums are computed together in `dots`: with DOT_QUERIES, registers are left for the operands."""


@intrinsic
def dots(typing, rows, queries, keys, key_stride, count, size, out, out_stride):
    """Products of 1 to DOT_QUERIES contiguous queries with LANES keys. The first `count` keys are read; the others repeat the
    last of these. Row r goes to `out` + r · `out_stride`.

    `size` elements each, a multiple of LANES; strides in elements. A key is read once for all queries. The partial
    sums of LANES keys are reduced together: four rounds of pairwise sums for 16 keys, instead of 16 sums over 16 lanes.
    """

    def emit(context, builder, sig, args):
        rows, queries, keys, key_stride, count, *others = args

        def emit_rows(key_indices):
            emit_count_switch(
                builder,
                rows,
                DOT_QUERIES,
                lambda number: _emit_dots(builder, number, queries, keys, key_stride, key_indices, *others),
            )

        with builder.if_else(builder.icmp_signed("<", count, INT64(LANES))) as (partial, full):
            with partial:
                emit_rows(_emit_key_indices(builder, count))
            with full:  # constant indices take a tenth off a decode's time
                emit_rows([INT64(key) for key in range(LANES)])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), emit


def _emit_dots(builder, rows, queries, keys, key_stride, key_indices, size, out, out_stride):
    query_indices = [builder.mul(size, INT64(row)) for row in range(rows)]
    reduced: list[list[Any]] = [[] for _ in range(rows)]
    for first_key in range(0, LANES, _DOT_KEYS):
        key_offsets = [builder.mul(key_stride, key) for key in key_indices[first_key : first_key + _DOT_KEYS]]
        sums = [[cgutils.alloca_once_value(builder, ZEROS) for _ in key_offsets] for _ in range(rows)]
        with cgutils.for_range_slice(builder, INT64(0), size, INT64(LANES), intp=INT64) as (index, _):
            values = [emit_load(builder, queries, builder.add(query_index, index)) for query_index in query_indices]
            for key, offset in enumerate(key_offsets):
                key_values = emit_load(builder, keys, builder.add(offset, index))
                for value, row_sums in zip(values, sums, strict=True):
                    builder.store(emit_fma(builder, value, key_values, builder.load(row_sums[key])), row_sums[key])
        for row_sums, row in zip(sums, reduced, strict=True):
            row.append(_emit_horizontal_sums(builder, [builder.load(each) for each in row_sums], 1))
    for query, halves in enumerate(reduced):
        emit_store(builder, out, builder.mul(out_stride, INT64(query)), _emit_horizontal_sums(builder, halves, _DOT_KEYS))


TRANSPOSED_DOT_QUERIES = 4 if LANES == 16 else 2
"""Queries that `dots_transposed` processes at a time. Each needs as many vectors as its tree of sums is deep, plus one."""


@intrinsic
def transpose_keys(typing, keys, key_stride, count, size, transposed):
    """Transpose LANES keys, of which the first `count` are read as by `dots`: [size, LANES] at `transposed`, whose row i
    holds element i of all keys."""

    def emit(context, builder, sig, args):
        keys, key_stride, count, size, transposed = args
        key_offsets = [builder.mul(key_stride, key) for key in _emit_key_indices(builder, count)]
        with cgutils.for_range_slice(builder, INT64(0), size, INT64(LANES), intp=INT64) as (index, _):
            vectors = [emit_load(builder, keys, builder.add(offset, index)) for offset in key_offsets]
            for lane, vector in enumerate(_emit_transpose(builder, vectors)):
                out_index = builder.mul(builder.add(index, INT64(lane)), INT64(LANES))
                emit_store(builder, transposed, out_index, vector)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), emit


@intrinsic
def dots_transposed(typing, rows, queries, size, transposed, out, out_stride):
    """The sums of `dots` for 1 to TRANSPOSED_DOT_QUERIES contiguous queries with keys transposed by `transpose_keys`, in the
    same order, lane by lane. Row r goes to `out` + r · `out_stride`."""

    def emit(context, builder, sig, args):
        emit_count_switch(
            builder, args[0], TRANSPOSED_DOT_QUERIES, lambda rows: _emit_dots_transposed(builder, rows, *args[1:])
        )
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), emit


def _emit_dots_transposed(builder, rows, queries, size, transposed, out, out_stride):
    """Partial sum l of a query is over its elements l, l + LANES, …; a tree adds neighbours first, like
    `_emit_horizontal_sums`."""
    query_indices = [builder.mul(size, INT64(row)) for row in range(rows)]
    sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(rows)]
    trees: list[list[Any]] = [[] for _ in range(rows)]
    for lane in range(LANES):
        for pointer in sums:
            builder.store(ZEROS, pointer)
        with cgutils.for_range_slice(builder, INT64(lane), size, INT64(LANES), intp=INT64) as (index, _):
            keys = emit_load(builder, transposed, builder.mul(index, INT64(LANES)))
            for query_index, pointer in zip(query_indices, sums, strict=True):
                factor = emit_splat(
                    builder, builder.load(element_pointer(builder, queries, builder.add(query_index, index)), align=BYTES)
                )
                builder.store(emit_fma(builder, factor, keys, builder.load(pointer)), pointer)
        for tree, pointer in zip(trees, sums, strict=True):
            value, carry = builder.load(pointer), lane
            while carry % 2:
                value, carry = builder.fadd(tree.pop(), value), carry // 2
            tree.append(value)
    for row, (total,) in enumerate(trees):
        emit_store(builder, out, builder.mul(out_stride, INT64(row)), total)


def _emit_transpose(builder, vectors):
    """Vector i of the result has lane i of each vector."""
    distance = 1
    while distance < LANES:
        low_lanes = [lane if not lane & distance else LANES + lane - distance for lane in range(LANES)]
        high_lanes = [lane + distance if not lane & distance else LANES + lane for lane in range(LANES)]
        swapped = list(vectors)
        for index in range(LANES):
            if not index & distance:
                pair = vectors[index], vectors[index + distance]
                swapped[index] = builder.shuffle_vector(*pair, ir.Constant(INTEGERS, low_lanes))
                swapped[index + distance] = builder.shuffle_vector(*pair, ir.Constant(INTEGERS, high_lanes))
        vectors = swapped
        distance *= 2
    return vectors


def _emit_key_indices(builder, count):
    """The indices of the LANES keys that are read: the first `count`, then the last of these again."""
    last = builder.sub(count, INT64(1))
    return [builder.select(builder.icmp_signed("<", INT64(key), last), INT64(key), last) for key in range(LANES)]


def _emit_horizontal_sums(builder, vectors, distance):
    """Add vectors of partial sums in pairs until one is left; the lanes of a vector hold `distance` keys, side by side."""
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
