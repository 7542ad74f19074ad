"""Gumbel-max noise and weights for other kernels: the operations of `kernels.gumbel`, each with one float32 rounding.

A kernel that calls these must be launched and compiled with `enable_fp_fusion=False`: a fused multiply-add rounds once where
the definition rounds twice, and the token drawn could differ from that on a CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels import gumbel

_GAMMA = tl.constexpr(gumbel.GAMMA)
_MIX_1 = tl.constexpr(gumbel.MIX_1)
_MIX_2 = tl.constexpr(gumbel.MIX_2)
_TOKEN_STEP = tl.constexpr(gumbel.TOKEN_STEP)
_HASH_1 = tl.constexpr(gumbel.HASH_1)
_HASH_2 = tl.constexpr(gumbel.HASH_2)
_SQRT_HALF_BITS = tl.constexpr(gumbel.SQRT_HALF_BITS)
_UNIT = tl.constexpr(2.0**-32)
_P0, _P1, _P2, _P3, _P4, _P5, _P6, _P7 = (tl.constexpr(c) for c in gumbel.LOG2_ONE_PLUS)
_Q0, _Q1, _Q2, _Q3, _Q4, _Q5 = (tl.constexpr(c) for c in gumbel.EXP2_MINUS)
_WEIGHT_ONE = tl.constexpr(2.0**gumbel.WEIGHT_BITS)
_FARTHEST = tl.constexpr(gumbel.FARTHEST)
_BOUND = tl.constexpr(31.4725 + 127)  # 32 − log2(log2(e)), 0.001 to allow for rounding, and the bias of exponents
_PATTERN_UNIT = tl.constexpr(2.0**-23)


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def noise_key(stream, position, DRAW: tl.constexpr):
    """stream: int64, position: int → uint64: the key from which all random numbers of one token are derived"""
    z = stream.to(tl.int64).to(tl.uint64, bitcast=True)
    if DRAW > 0:
        z = _mix(z + DRAW)
    return _mix(z + (position.to(tl.int64).to(tl.uint64, bitcast=True) + 1) * _GAMMA)


@triton.jit
def key_uniform(key):
    """A key's uniform number in [0, 1), float64, which holds its 48 bits exactly."""
    return (key >> 16).to(tl.int64).to(tl.float64) * (1.0 / 281474976710656.0)


@triton.jit
def noise_bits(key, ids):
    """key: uint64, ids: int32 → uint32, odd"""
    x = ids.to(tl.uint32) * _TOKEN_STEP + key.to(tl.uint32)
    x ^= x >> 16
    x *= _HASH_1
    x ^= x >> 15
    x += (key >> 32).to(tl.uint32)
    x *= _HASH_2
    return (x ^ (x >> 15)) | 1


@triton.jit
def _log2_one_plus(t):
    p = t * 0.0 + _P7
    p = p * t + _P6
    p = p * t + _P5
    p = p * t + _P4
    p = p * t + _P3
    p = p * t + _P2
    p = p * t + _P1
    p = p * t + _P0
    return t * p


@triton.jit
def exponential_noise(bits):
    """bits: uint32 → −log2(1 − bits / 2^32), float32 above zero"""
    below = bits.to(tl.float32) * _UNIT
    complement = (0 - bits).to(tl.float32) * _UNIT  # 2^32 − bits, in 32 bits
    pattern = complement.to(tl.int32, bitcast=True)
    exponent = (pattern - _SQRT_HALF_BITS) >> 23
    t = (pattern - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    t = tl.where(exponent == 0, -below, t)
    return -(exponent.to(tl.float32) + _log2_one_plus(t))


@triton.jit
def gumbel_noise(bits):
    """bits: uint32 → −log2(E), float32"""
    pattern = exponential_noise(bits).to(tl.int32, bitcast=True)
    exponent = (pattern - _SQRT_HALF_BITS) >> 23
    t = (pattern - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    return -(exponent.to(tl.float32) + _log2_one_plus(t))


@triton.jit
def gumbel_noise_bound(bits):
    """At least `gumbel_noise`, and within 0.09 where noise is large: E ≥ bits / 2^32 · log2(e), and between powers of two a
    logarithm lies above the line that the pattern of a float follows. Three operations."""
    pattern = bits.to(tl.float32).to(tl.int32, bitcast=True)
    return _BOUND - pattern.to(tl.float32) * _PATTERN_UNIT


@triton.jit
def top_p_weight(orders):
    """orders ≥ 0 float32: binary orders below the likeliest token → int64, 2^30 for the likeliest, 0 from 31 orders on"""
    near = tl.minimum(orders, _FARTHEST)
    whole = near.to(tl.int32)
    f = near - whole.to(tl.float32)
    p = f * 0.0 + _Q5
    p = p * f + _Q4
    p = p * f + _Q3
    p = p * f + _Q2
    p = p * f + _Q1
    p = p * f + _Q0
    scaled = (p * _WEIGHT_ONE).to(tl.int32) >> whole
    return tl.where(near < _FARTHEST, scaled, 0).to(tl.int64)


@triton.jit
def typical_moment(weight, orders):
    """A token's contribution to the mean that typical sampling starts from: int64. weight: int64, from `top_p_weight`"""
    return (weight.to(tl.float32) * tl.minimum(orders, _FARTHEST)).to(tl.int64)


@triton.jit
def typical_centre(moments, total, scale):
    """The mean distance of tokens, float32. moments, total: int64 sums; scale: float32"""
    return (moments.to(tl.float64) / total.to(tl.float64) / scale.to(tl.float64)).to(tl.float32)
