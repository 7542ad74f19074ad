"""Gumbel-max noise keyed by (seed, position, token), and the weights of top-p and typical sampling: one definition for all
implementations.

Each token that may be drawn gets its own exponential variate E, and the token with the largest log2(weight) − log2(E), or
weight / E, is drawn: with probability weight / Σ weights (Gumbel 1954; the form used here is section 2 of arXiv 1611.00712).
Nothing is summed, so the token drawn depends neither on how a row is split nor on tokens that are left out. If two computations
of the same logits differ in the last bits, the token differs only where the two best scores are as close. Every step below is
an integer operation or one correctly rounded float32 operation (never fused), so that a GPU, a CPU and the plain twins get the
same bits. The functions here are these steps in plain torch, on any device.

    key    = mix(stream + GAMMA · (position + 1))     64 bits; stream as in `engine.sampling.randomness`
    bits   = hash of the token, keyed by both halves of `key`, odd        32 bits
    E      = −log2(1 − bits / 2^32)
    log2   : x = 2^e · (1 + t) with √½ ≤ 1 + t < √2, e + t · P(t)
    weight = ⌊2^30 · Q(f)⌋ / 2^n for a token n + f binary orders below the likeliest one; 0 from 31 on. Integers: their sums
             have no order either.
    centre = (Σ ⌊weight · distance · scale⌋ / Σ weight) / scale, of the tokens that are kept: the mean distance. A surprise
             −log2 p is distance · scale and the logarithm of the sum, and the entropy is its mean, so that |surprise − entropy|
             is |distance − centre| · scale: typical sampling weighs tokens in the order of |distance − centre|.
"""

from __future__ import annotations

import torch

GAMMA = 0x9E3779B97F4A7C15  # from SplitMix64, like the next two
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB

TOKEN_STEP = 0x9E3779B1  # odd, near 2^32 over the golden ratio
HASH_1 = 0x21F0AAAD  # multipliers and shifts of a 32-bit finaliser of low bias, found by Wellons' and Ettinger's search
HASH_2 = 0xD35A2D97

SQRT_HALF_BITS = 0x3F3504F3  # of √½ in float32
LOG2_ONE_PLUS = (  # P, with the least relative error on [√½ − 1, √2 − 1]: 2.3e-7
    1.442694902420044,
    -0.7213528156280518,
    0.48092323541641235,
    -0.3602396249771118,
    0.2870987057685852,
    -0.24887686967849731,
    0.23404233157634735,
    -0.14581161737442017,
)
EXP2_MINUS = (  # Q, with the least relative error on [0, 1]: 9e-8
    1.0,
    -0.6931437253952026,
    0.2401801496744156,
    -0.0552973598241806,
    0.009205798618495464,
    -0.0009449036442674696,
)
WEIGHT_BITS = 30
FARTHEST = 31.0  # binary orders below the likeliest token beyond which a weight is zero

DRAFT, ACCEPT, RESIDUAL = 1, 2, 3
"""Draws of independent noise besides draw 0, which chooses the token of plain decoding: for the token of a draft model, for the
uniform number that accepts or rejects it, and for the token that replaces it."""

NO_TOKEN = -1
"""The token of a row from which none can be drawn: no finite maximum, NaN, or all tokens forbidden."""

_LOW_32_BITS = 0xFFFFFFFF


def _as_int64(number: int) -> int:
    """An unsigned 64-bit number as the int64 with the same bits."""
    return number - 2**64 if number >= 2**63 else number


def _logical_shift_right(z: torch.Tensor, count: int) -> torch.Tensor:
    """z: int64, interpreted as unsigned"""
    return (z >> count) & ((1 << (64 - count)) - 1)


def mix(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _logical_shift_right(z, 30)) * _as_int64(MIX_1)
    z = (z ^ _logical_shift_right(z, 27)) * _as_int64(MIX_2)
    return z ^ _logical_shift_right(z, 31)


def keys(streams: torch.Tensor, positions: torch.Tensor, draw: int = 0) -> torch.Tensor:
    """The 64 random bits that key a token's noise: streams, positions: [R] int64 → [R] int64"""
    if draw:
        streams = mix(streams + draw)
    return mix(streams + (positions.long() + 1) * _as_int64(GAMMA))


def uniform(key: torch.Tensor) -> torch.Tensor:
    """A uniform number from each key's upper 48 bits: [R] int64 → [R] float64 in [0, 1)"""
    return _logical_shift_right(key, 16).double() / 2.0**48


def bits(key: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The hash of each token. key: [R], ids: [R or 1, C] → [R, C] int64, odd numbers below 2^32"""
    low, high = (key & _LOW_32_BITS)[:, None], _logical_shift_right(key, 32)[:, None]
    x = (ids.long() * TOKEN_STEP + low) & _LOW_32_BITS
    x = x ^ (x >> 16)
    x = (x * HASH_1) & _LOW_32_BITS
    x = x ^ (x >> 15)
    x = (x + high) & _LOW_32_BITS
    x = (x * HASH_2) & _LOW_32_BITS
    return (x ^ (x >> 15)) | 1


def _polynomial(x: torch.Tensor, coefficients: tuple[float, ...]) -> torch.Tensor:
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value


def _split_exponent(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x > 0 float32 → exponent e (int32) and t with x = 2^e · (1 + t)"""
    pattern = x.view(torch.int32)
    exponent = (pattern - SQRT_HALF_BITS) >> 23
    return exponent, (pattern - (exponent << 23)).view(torch.float32) - 1.0


def log2(x: torch.Tensor) -> torch.Tensor:
    exponent, t = _split_exponent(x)
    return exponent.float() + t * _polynomial(t, LOG2_ONE_PLUS)


def exponential(hashed: torch.Tensor) -> torch.Tensor:
    """The exponential variate E of hashes from `bits`, float32 above zero. Near 1 the argument is computed from the bits,
    because float32 would round it."""
    exponent, t = _split_exponent((2**32 - hashed).float() * 2.0**-32)
    t = torch.where(exponent == 0, hashed.float() * -(2.0**-32), t)
    return -(exponent.float() + t * _polynomial(t, LOG2_ONE_PLUS))


def noise(key: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The Gumbel noise −log2(E) of each token: [R, C] float32"""
    return -log2(exponential(bits(key, ids)))


def weights(orders: torch.Tensor) -> torch.Tensor:
    """Integer weights of tokens for top-p. orders ≥ 0 float32, binary orders below the likeliest token (inf and more than 31
    weigh nothing) → int64"""
    clamped = orders.clamp(max=FARTHEST)
    integer = clamped.int()
    scaled = (_polynomial(clamped - integer.float(), EXP2_MINUS) * 2.0**WEIGHT_BITS).long()
    return torch.where(clamped < FARTHEST, scaled >> integer.long(), 0)


def deviations(distance: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """How far each token's surprise is from the entropy, multiplied by `scale`, in binary orders: [..., C] float32

    distance: [..., C] ≥ 0 below the largest logit; weight: [..., C] int64, at least one above 0; scale: [..., 1] or one number
    """
    moments = (weight.float() * (distance * scale).clamp(max=FARTHEST)).long()
    mean = moments.sum(-1, keepdim=True).double() / weight.sum(-1, keepdim=True).double()
    return (distance - (mean / scale.double()).float()).abs()
