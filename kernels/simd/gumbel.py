"""Gumbel-max noise and weights for LANES tokens at a time, with the bits of `kernels.gumbel`: nothing here is fused."""

from __future__ import annotations

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels import gumbel
from kernels.simd.compiling import subroutine
from kernels.simd.vectors import INT32, INTEGERS, LANES, VECTOR, emit_splat, f32s

_LANE_INDICES = ir.Constant(INTEGERS, list(range(LANES)))


def _signed(number: int, bits: int) -> int:
    """An unsigned number as the signed number with the same bits."""
    return number - (1 << bits) if number >> (bits - 1) else number


def _float_constant(number: float) -> ir.Constant:
    return ir.Constant(VECTOR, [number] * LANES)


def _int_constant(number: int) -> ir.Constant:
    return ir.Constant(INTEGERS, [_signed(number, 32)] * LANES)


def _emit_splat_low_half(builder, value):
    """The lower half of an int64 in all lanes."""
    lane_0 = builder.insert_element(ir.Constant(INTEGERS, ir.Undefined), builder.trunc(value, INT32), INT32(0))
    return builder.shuffle_vector(lane_0, ir.Constant(INTEGERS, ir.Undefined), ir.Constant(INTEGERS, [0] * LANES))


def _emit_xor_shift(builder, x, count):
    return builder.xor(x, builder.lshr(x, _int_constant(count)))


def _emit_bits(builder, index, key):
    """Hashes of the tokens from `index` on: odd numbers below 2³²."""
    ids = builder.add(_emit_splat_low_half(builder, index), _LANE_INDICES)
    x = builder.add(builder.mul(ids, _int_constant(gumbel.TOKEN_STEP)), _emit_splat_low_half(builder, key))
    x = builder.mul(_emit_xor_shift(builder, x, 16), _int_constant(gumbel.HASH_1))
    x = builder.add(_emit_xor_shift(builder, x, 15), _emit_splat_low_half(builder, builder.lshr(key, key.type(32))))
    x = builder.mul(x, _int_constant(gumbel.HASH_2))
    return builder.or_(_emit_xor_shift(builder, x, 15), _int_constant(1))


def _emit_split_exponent(builder, x):
    """x > 0 → exponent e and t with x = 2^e · (1 + t)"""
    pattern = builder.bitcast(x, INTEGERS)
    exponent = builder.ashr(builder.sub(pattern, _int_constant(gumbel.SQRT_HALF_BITS)), _int_constant(23))
    mantissa = builder.sub(pattern, builder.shl(exponent, _int_constant(23)))
    return exponent, builder.fsub(builder.bitcast(mantissa, VECTOR), _float_constant(1.0))


def _emit_polynomial(builder, x, coefficients):
    value = _float_constant(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = builder.fadd(builder.fmul(value, x), _float_constant(coefficient))
    return value


def _emit_log2(builder, exponent, t):
    integer = builder.sitofp(exponent, VECTOR)
    return builder.fadd(integer, builder.fmul(t, _emit_polynomial(builder, t, gumbel.LOG2_ONE_PLUS)))


def _emit_exponential(builder, hashed):
    """E; near 1 the argument of its logarithm is computed from the bits, because float32 would round it."""
    argument = builder.fmul(builder.uitofp(builder.neg(hashed), VECTOR), _float_constant(2.0**-32))
    exponent, t = _emit_split_exponent(builder, argument)
    near = builder.fmul(builder.uitofp(hashed, VECTOR), _float_constant(-(2.0**-32)))
    t = builder.select(builder.icmp_signed("==", exponent, _int_constant(0)), near, t)
    return builder.fneg(_emit_log2(builder, exponent, t))


@intrinsic
def gumbel_noise(typing, index, key):
    """−log2(E) of the tokens from `index` on, for a 64-bit key."""

    def emit(context, builder, sig, args):
        return builder.fneg(
            _emit_log2(builder, *_emit_split_exponent(builder, _emit_exponential(builder, _emit_bits(builder, *args))))
        )

    return f32s(types.int64, types.int64), emit


@intrinsic
def weights(typing, orders):
    """Weights of tokens that are `orders` binary orders below the likeliest one: integers in the bits of float32."""

    def emit(context, builder, sig, args):
        (orders,) = args
        is_near = builder.fcmp_ordered("<", orders, _float_constant(gumbel.FARTHEST))
        near = builder.select(is_near, orders, _float_constant(gumbel.FARTHEST))
        integer = builder.fptosi(near, INTEGERS)
        part = builder.fsub(near, builder.sitofp(integer, VECTOR))
        scaled = builder.fmul(_emit_polynomial(builder, part, gumbel.EXP2_MINUS), _float_constant(2.0**gumbel.WEIGHT_BITS))
        scaled_weights = builder.lshr(builder.fptosi(scaled, INTEGERS), integer)
        return builder.bitcast(builder.select(is_near, scaled_weights, _int_constant(0)), VECTOR)

    return f32s(f32s), emit


@intrinsic
def multiply_unfused(typing, x, factor):
    """x · factor, rounded before anything is added to it (not fused)."""
    return f32s(f32s, types.float32), lambda context, builder, sig, args: builder.fmul(args[0], emit_splat(builder, args[1]))


_GAMMA, _MIX_1, _MIX_2 = (_signed(number, 64) for number in (gumbel.GAMMA, gumbel.MIX_1, gumbel.MIX_2))


@subroutine
def _xor_shift(z, count):
    return z ^ ((z >> count) & ((1 << (64 - count)) - 1))


@subroutine
def noise_key(stream, position):
    """The 64 random bits that key a token's noise."""
    z = stream + (position + 1) * numba.int64(_GAMMA)
    z = _xor_shift(z, 30) * numba.int64(_MIX_1)
    z = _xor_shift(z, 27) * numba.int64(_MIX_2)
    return _xor_shift(z, 31)
