"""Gumbel-max noise and weights for LANES tokens at a time, with the bits of `kernels.gumbel`: nothing here is fused."""

from __future__ import annotations

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels import gumbel
from kernels.simd.compiling import part
from kernels.simd.vectors import INT32, INTEGERS, LANES, VECTOR, emit_splat, f32s

_ORDER = ir.Constant(INTEGERS, list(range(LANES)))


def _signed(number: int, bits: int) -> int:
    """An unsigned number as the signed number with the same bits."""
    return number - (1 << bits) if number >> (bits - 1) else number


def _numbers(number: float) -> ir.Constant:
    return ir.Constant(VECTOR, [number] * LANES)


def _wholes(number: int) -> ir.Constant:
    return ir.Constant(INTEGERS, [_signed(number, 32)] * LANES)


def _emit_whole(builder, value):
    """The lower half of an int64 in all lanes."""
    alone = builder.insert_element(ir.Constant(INTEGERS, ir.Undefined), builder.trunc(value, INT32), INT32(0))
    return builder.shuffle_vector(alone, ir.Constant(INTEGERS, ir.Undefined), ir.Constant(INTEGERS, [0] * LANES))


def _emit_folded(builder, x, count):
    return builder.xor(x, builder.lshr(x, _wholes(count)))


def _emit_bits(builder, index, key):
    """Hashes of the tokens from `index` on: odd numbers below 2³²."""
    ids = builder.add(_emit_whole(builder, index), _ORDER)
    x = builder.add(builder.mul(ids, _wholes(gumbel.TOKEN_STEP)), _emit_whole(builder, key))
    x = builder.mul(_emit_folded(builder, x, 16), _wholes(gumbel.HASH_1))
    x = builder.add(_emit_folded(builder, x, 15), _emit_whole(builder, builder.lshr(key, key.type(32))))
    x = builder.mul(x, _wholes(gumbel.HASH_2))
    return builder.or_(_emit_folded(builder, x, 15), _wholes(1))


def _emit_parts(builder, x):
    """x > 0 → exponent e and t with x = 2^e · (1 + t)"""
    pattern = builder.bitcast(x, INTEGERS)
    exponent = builder.ashr(builder.sub(pattern, _wholes(gumbel.SQRT_HALF_BITS)), _wholes(23))
    mantissa = builder.sub(pattern, builder.shl(exponent, _wholes(23)))
    return exponent, builder.fsub(builder.bitcast(mantissa, VECTOR), _numbers(1.0))


def _emit_polynomial(builder, x, coefficients):
    value = _numbers(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = builder.fadd(builder.fmul(value, x), _numbers(coefficient))
    return value


def _emit_log2(builder, exponent, t):
    whole = builder.sitofp(exponent, VECTOR)
    return builder.fadd(whole, builder.fmul(t, _emit_polynomial(builder, t, gumbel.LOG2_ONE_PLUS)))


def _emit_exponential(builder, noise):
    """E; near 1 the argument of its logarithm is computed from the bits, because float32 would round it."""
    argument = builder.fmul(builder.uitofp(builder.neg(noise), VECTOR), _numbers(2.0**-32))
    exponent, t = _emit_parts(builder, argument)
    near = builder.fmul(builder.uitofp(noise, VECTOR), _numbers(-(2.0**-32)))
    t = builder.select(builder.icmp_signed("==", exponent, _wholes(0)), near, t)
    return builder.fneg(_emit_log2(builder, exponent, t))


@intrinsic
def gumbel_noise(typing, index, key):
    """−log2(E) of the tokens from `index` on, for a 64-bit key."""

    def emit(context, builder, sig, args):
        return builder.fneg(_emit_log2(builder, *_emit_parts(builder, _emit_exponential(builder, _emit_bits(builder, *args)))))

    return f32s(types.int64, types.int64), emit


@intrinsic
def weights(typing, orders):
    """Weights of tokens `orders` binary orders below the likeliest: integers in the bits of float32."""

    def emit(context, builder, sig, args):
        (orders,) = args
        is_near = builder.fcmp_ordered("<", orders, _numbers(gumbel.FARTHEST))
        near = builder.select(is_near, orders, _numbers(gumbel.FARTHEST))
        whole = builder.fptosi(near, INTEGERS)
        part = builder.fsub(near, builder.sitofp(whole, VECTOR))
        scaled = builder.fmul(_emit_polynomial(builder, part, gumbel.EXP2_MINUS), _numbers(2.0**gumbel.WEIGHT_BITS))
        found = builder.lshr(builder.fptosi(scaled, INTEGERS), whole)
        return builder.bitcast(builder.select(is_near, found, _wholes(0)), VECTOR)

    return f32s(f32s), emit


@intrinsic
def times(typing, x, factor):
    """x · factor, rounded before anything is added to it (not fused)."""
    return f32s(f32s, types.float32), lambda context, builder, sig, args: builder.fmul(args[0], emit_splat(builder, args[1]))


_GAMMA, _MIX_1, _MIX_2 = (_signed(number, 64) for number in (gumbel.GAMMA, gumbel.MIX_1, gumbel.MIX_2))


@part
def _folded(z, count):
    return z ^ ((z >> count) & ((1 << (64 - count)) - 1))


@part
def key_of(stream, position):
    """The 64 random bits that key a token's noise."""
    z = stream + (position + 1) * numba.int64(_GAMMA)
    z = _folded(z, 30) * numba.int64(_MIX_1)
    z = _folded(z, 27) * numba.int64(_MIX_2)
    return _folded(z, 31)
