"""Vectors of float32 as wide as this processor's registers, for functions that Numba compiles.

`f32s` is LLVM's vector type, so the processor runs what is written here: nothing is left to an auto-vectoriser. Memory is
addressed by integers: `address` in bytes, `index` in elements of four bytes from there. A product and a sum may be fused into
one rounding ("contract"); nothing is reordered, and NaN and infinities keep their meaning.

A Numba `intrinsic` is a function of types that returns the result's type and a function that emits the instructions.
"""

from __future__ import annotations

import math
import operator

import numba
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model

from kernels.simd.compiling import subroutine


def _lanes() -> int:
    features = numba.config.CPU_FEATURES
    if features is None:
        features = binding.get_host_cpu_features().flatten()
    if "+avx512f" in features:
        return 16
    return 8 if "+avx" in features else 4


LANES = _lanes()
BYTES = 4
FLOAT, INT32, INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VECTOR, INTEGERS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT32, LANES)
ZEROS = ir.Constant(VECTOR, [0.0] * LANES)
CONTRACT = ("contract",)


class Float32s(types.Type):
    """LANES float32 elements."""

    def __init__(self) -> None:
        super().__init__(name=f"f32x{LANES}")


f32s = Float32s()


@register_model(Float32s)
class _Model(models.PrimitiveModel):
    def __init__(self, manager, fe_type):
        super().__init__(manager, fe_type, VECTOR)


class _Binary(AbstractTemplate):
    def generic(self, args, kws):
        if kws or args != (f32s, f32s):
            return None
        return signature(f32s, f32s, f32s)


def _define_operator(function, emit) -> None:
    infer_global(function)(type(f"_{function.__name__}", (_Binary,), {"key": function}))
    lower_builtin(function, f32s, f32s)(lambda context, builder, sig, args: emit(builder, *args))


_define_operator(operator.add, lambda builder, x, y: builder.fadd(x, y, flags=CONTRACT))
_define_operator(operator.sub, lambda builder, x, y: builder.fsub(x, y, flags=CONTRACT))
_define_operator(operator.mul, lambda builder, x, y: builder.fmul(x, y, flags=CONTRACT))
_define_operator(operator.truediv, lambda builder, x, y: builder.fdiv(x, y))


def element_pointer(builder, address, index, element=FLOAT):
    """The pointer to an element."""
    return builder.gep(builder.inttoptr(address, element.as_pointer()), [index])


def emit_load(builder, address, index):
    """Load LANES elements, from an element on."""
    return builder.load(builder.bitcast(element_pointer(builder, address, index), VECTOR.as_pointer()), align=BYTES)


def emit_store(builder, address, index, value):
    """Store LANES elements to an element and those after it."""
    builder.store(value, builder.bitcast(element_pointer(builder, address, index), VECTOR.as_pointer()), align=BYTES)


def emit_masked_store(builder, address, index, end, value):
    """As `emit_store`, but nothing is written from element `end` on."""
    pointer = builder.bitcast(element_pointer(builder, address, index), VECTOR.as_pointer())
    mask = _emit_mask(builder, builder.sub(end, index))
    emit_call(builder, f"llvm.masked.store.v{LANES}f32.p0", ir.VoidType(), [value, pointer, INT32(BYTES), mask])


def emit_splat(builder, value):
    """A value in all lanes."""
    lane_0 = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), value, INT32(0))
    return builder.shuffle_vector(lane_0, ir.Constant(VECTOR, ir.Undefined), ir.Constant(INTEGERS, [0] * LANES))


def emit_call(builder, name, result, arguments):
    """Call one of LLVM's own functions by its full name."""
    function_type = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)


def emit_fma(builder, x, y, z):
    """x · y + z with one rounding."""
    return emit_call(builder, f"llvm.fma.v{LANES}f32", VECTOR, [x, y, z])


def _emit_mask(builder, count):
    """A mask of the first `count` lanes."""
    lane_0 = builder.insert_element(ir.Constant(INTEGERS, ir.Undefined), builder.trunc(count, INT32), INT32(0))
    counts = builder.shuffle_vector(lane_0, ir.Constant(INTEGERS, ir.Undefined), ir.Constant(INTEGERS, [0] * LANES))
    return builder.icmp_signed("<", ir.Constant(INTEGERS, list(range(LANES))), counts)


@intrinsic
def splat(typing, value):
    """A number in all lanes, rounded to float32."""
    return f32s(types.float32), lambda context, builder, sig, args: emit_splat(builder, args[0])


@intrinsic
def load(typing, address, index):
    """LANES elements from element `index` on."""
    return f32s(types.int64, types.int64), lambda context, builder, sig, args: emit_load(builder, *args)


@intrinsic
def masked_load(typing, address, index, end):
    """As `load`, but nothing is read from element `end` on: those lanes are zero."""

    def emit(context, builder, sig, args):
        address, index, end = args
        pointer = builder.bitcast(element_pointer(builder, address, index), VECTOR.as_pointer())
        mask = _emit_mask(builder, builder.sub(end, index))
        return emit_call(builder, f"llvm.masked.load.v{LANES}f32.p0", VECTOR, [pointer, INT32(BYTES), mask, ZEROS])

    return f32s(types.int64, types.int64, types.int64), emit


@intrinsic
def store(typing, address, index, value):
    """Store LANES elements to element `index` and those after it."""

    def emit(context, builder, sig, args):
        address, index, value = args
        emit_store(builder, address, index, value)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, f32s), emit


@intrinsic
def masked_store(typing, address, index, end, value):
    """As `store`, but nothing is written from element `end` on."""

    def emit(context, builder, sig, args):
        emit_masked_store(builder, *args)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, f32s), emit


@intrinsic
def first_lanes(typing, value, count, other):
    """The first `count` lanes of `value` and the other lanes of `other`."""

    def emit(context, builder, sig, args):
        value, count, other = args
        return builder.select(_emit_mask(builder, count), value, other)

    return f32s(f32s, types.int64, f32s), emit


@intrinsic
def where_less(typing, x, y, chosen, other):
    """`chosen` in the lanes where x < y; otherwise, also where one of them is NaN, `other`."""

    def emit(context, builder, sig, args):
        x, y, chosen, other = args
        return builder.select(builder.fcmp_ordered("<", x, y), chosen, other)

    return f32s(f32s, f32s, f32s, f32s), emit


@intrinsic
def fma(typing, x, y, z):
    """x · y + z with one rounding."""
    return f32s(f32s, f32s, f32s), lambda context, builder, sig, args: emit_fma(builder, *args)


@intrinsic
def power_of_two(typing, shifted):
    """2ⁿ for integers n to which 1.5 · 2²³ was added, so that they are in the lowest bits; -126 ≤ n ≤ 127."""

    def emit(context, builder, sig, args):
        bits = builder.add(builder.bitcast(args[0], INTEGERS), ir.Constant(INTEGERS, [127] * LANES))
        return builder.bitcast(builder.shl(bits, ir.Constant(INTEGERS, [23] * LANES)), VECTOR)

    return f32s(f32s), emit


def _emit_reduction(builder, value, combine):
    """Combine all lanes: the lower half with the upper half, until one lane is left."""
    width = LANES
    while width > 1:
        width //= 2
        index_type = ir.VectorType(INT32, width)
        undefined = ir.Constant(value.type, ir.Undefined)
        low = builder.shuffle_vector(value, undefined, ir.Constant(index_type, list(range(width))))
        high = builder.shuffle_vector(value, undefined, ir.Constant(index_type, list(range(width, 2 * width))))
        value = combine(low, high)
    return builder.extract_element(value, INT32(0))


@intrinsic
def reduce_sum(typing, value):
    """The sum of all lanes, in the order of `_emit_reduction`."""
    return types.float32(f32s), lambda context, builder, sig, args: _emit_reduction(builder, args[0], builder.fadd)


@intrinsic
def reduce_max(typing, value):
    """The largest lane; unspecified if one of them is NaN."""

    def emit(context, builder, sig, args):
        return _emit_reduction(builder, args[0], lambda x, y: builder.select(builder.fcmp_ordered("<", x, y), y, x))

    return types.float32(f32s), emit


@intrinsic
def load_float32(typing, address, index):
    """Load one float32."""
    return (
        types.float32(types.int64, types.int64),
        lambda context, builder, sig, args: builder.load(element_pointer(builder, args[0], args[1]), align=BYTES),
    )


@intrinsic
def store_float32(typing, address, index, value):
    """Store one float32."""

    def emit(context, builder, sig, args):
        address, index, value = args
        builder.store(value, element_pointer(builder, address, index), align=BYTES)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), emit


@intrinsic
def load_int32(typing, address, index):
    """Load one integer of four bytes."""

    def emit(context, builder, sig, args):
        return builder.sext(builder.load(element_pointer(builder, args[0], args[1], INT32), align=BYTES), INT64)

    return types.int64(types.int64, types.int64), emit


@intrinsic
def load_int64(typing, address, index):
    """Load one integer of eight bytes; `index` counts these."""
    return (
        types.int64(types.int64, types.int64),
        lambda context, builder, sig, args: builder.load(element_pointer(builder, args[0], args[1], INT64), align=8),
    )


@intrinsic
def store_int32(typing, address, index, value):
    """Store one integer of four bytes."""

    def emit(context, builder, sig, args):
        address, index, value = args
        builder.store(builder.trunc(value, INT32), element_pointer(builder, address, index, INT32), align=BYTES)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic
def store_int64(typing, address, index, value):
    """Store one integer of eight bytes; `index` counts these."""

    def emit(context, builder, sig, args):
        address, index, value = args
        builder.store(value, element_pointer(builder, address, index, INT64), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


def stack_buffer(count):
    """A function without arguments that returns the address of memory for `count` float32, valid until its caller returns."""

    @intrinsic
    def buffer(typing):
        def emit(context, builder, sig, args):
            with builder.goto_entry_block():
                pointer = builder.alloca(FLOAT, INT64(count))
                pointer.align = 64
            return builder.ptrtoint(pointer, INT64)

        return types.int64(), emit

    return buffer


@subroutine
def clear(address, count):
    """Store zeros to `count` elements, a multiple of LANES."""
    for index in range(0, count, LANES):
        store(address, index, splat(0.0))


@subroutine
def padded_load(address, index, end, padding):
    """As `load`, with the lanes of `padding` from element `end` on."""
    return first_lanes(masked_load(address, index, end), end - index, padding)


@subroutine
def maximum(x, y):
    """The larger of x and y, lane by lane; x where one of them is NaN."""
    return where_less(x, y, y, x)


_LOWEST, _HIGHEST = -87.33, 88.37
_SHIFT = 12582912.0  # 1.5 · 2²³: adding it rounds a number below 2²² to an integer
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4


@subroutine
def exp(x):
    """eˣ within two units in the last place, 0 below -87.33, infinite above 88.37: 2ⁿ · e^r, |r| ≤ ln(2) / 2 (Cephes, expf)."""
    lowest = splat(_LOWEST)
    clamped = where_less(x, lowest, lowest, x)
    highest = splat(_HIGHEST)
    clamped = where_less(highest, clamped, highest, clamped)
    shifted = fma(clamped, splat(_LOG2_E), splat(_SHIFT))
    integer = shifted - splat(_SHIFT)
    reduced = fma(integer, splat(-_LN2_HIGH), clamped)
    reduced = fma(integer, splat(-_LN2_LOW), reduced)
    value = splat(1.9875691500e-4)
    value = fma(value, reduced, splat(1.3981999507e-3))
    value = fma(value, reduced, splat(8.3334519073e-3))
    value = fma(value, reduced, splat(4.1665795894e-2))
    value = fma(value, reduced, splat(1.6666665459e-1))
    value = fma(value, reduced, splat(5.0000001201e-1))
    one = splat(1.0)
    value = fma(value * reduced, reduced, reduced + one)
    value = where_less(x, lowest, splat(0.0), value * power_of_two(shifted))
    return where_less(highest, x, splat(math.inf), value)


@subroutine
def tanh(x):
    """The hyperbolic tangent: a polynomial near zero, where 1 - 2 / (e²ˣ + 1) would lose digits (Cephes, tanhf)."""
    zero, one, two = splat(0.0), splat(1.0), splat(2.0)
    square = x * x
    near = splat(-5.70498872745e-3)
    near = fma(near, square, splat(2.06390887954e-2))
    near = fma(near, square, splat(-5.37397155531e-2))
    near = fma(near, square, splat(1.33314422036e-1))
    near = fma(near, square, splat(-3.33332819422e-1))
    near = fma(near * square, x, x)
    magnitude = where_less(x, zero, zero - x, x)
    far = one - two / (exp(magnitude * two) + one)
    far = where_less(x, zero, zero - far, far)
    return where_less(magnitude, splat(0.625), near, far)
