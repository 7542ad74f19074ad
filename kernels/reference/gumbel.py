"""Gumbel-max noise and weights in plain torch, on any device, operation by operation as `kernels.gumbel` defines them."""

from __future__ import annotations

import torch

from kernels import gumbel

_LOW = 0xFFFFFFFF


def _signed(number: int) -> int:
    """An unsigned 64-bit number as the int64 of the same bits."""
    return number - 2**64 if number >= 2**63 else number


def _shifted(z: torch.Tensor, count: int) -> torch.Tensor:
    """z: int64 taken as unsigned"""
    return (z >> count) & ((1 << (64 - count)) - 1)


def mix(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shifted(z, 30)) * _signed(gumbel.MIX_1)
    z = (z ^ _shifted(z, 27)) * _signed(gumbel.MIX_2)
    return z ^ _shifted(z, 31)


def keys(streams: torch.Tensor, positions: torch.Tensor, draw: int = 0) -> torch.Tensor:
    """The 64 random bits that key a token: streams, positions: [R] int64 → [R] int64"""
    if draw:
        streams = mix(streams + draw)
    return mix(streams + (positions.long() + 1) * _signed(gumbel.GAMMA))


def uniform(key: torch.Tensor) -> torch.Tensor:
    """A uniform number of each key, as `engine.sampling.randomness.uniform`: [R] int64 → [R] float64 in [0, 1)"""
    return _shifted(key, 16).double() / 2.0**48


def bits(key: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The hash of each token. key: [R], ids: [R or 1, C] → [R, C] int64, odd numbers below 2^32"""
    low, high = (key & _LOW)[:, None], _shifted(key, 32)[:, None]
    x = (ids.long() * gumbel.TOKEN_STEP + low) & _LOW
    x = x ^ (x >> 16)
    x = (x * gumbel.HASH_1) & _LOW
    x = x ^ (x >> 15)
    x = (x + high) & _LOW
    x = (x * gumbel.HASH_2) & _LOW
    return (x ^ (x >> 15)) | 1


def _polynomial(x: torch.Tensor, coefficients: tuple[float, ...]) -> torch.Tensor:
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value


def _parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x > 0 float32 → exponent e (int32) and t with x = 2^e · (1 + t)"""
    pattern = x.view(torch.int32)
    exponent = (pattern - gumbel.SQRT_HALF_BITS) >> 23
    return exponent, (pattern - (exponent << 23)).view(torch.float32) - 1.0


def log2(x: torch.Tensor) -> torch.Tensor:
    exponent, t = _parts(x)
    return exponent.float() + t * _polynomial(t, gumbel.LOG2_ONE_PLUS)


def exponential(hashed: torch.Tensor) -> torch.Tensor:
    """The exponential variate E of hashes from `bits`, float32 above zero. Near 1 its argument is taken from the bits, which
    float32 would round."""
    exponent, t = _parts((2**32 - hashed).float() * 2.0**-32)
    t = torch.where(exponent == 0, hashed.float() * -(2.0**-32), t)
    return -(exponent.float() + t * _polynomial(t, gumbel.LOG2_ONE_PLUS))


def noise(key: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The Gumbel noise −log2(E) of each token: [R, C] float32"""
    return -log2(exponential(bits(key, ids)))


def weights(orders: torch.Tensor) -> torch.Tensor:
    """Integer weights of tokens for top-p. orders ≥ 0 float32, binary orders below the likeliest token (inf and more than 31
    weigh nothing) → int64"""
    near = orders.clamp(max=gumbel.FARTHEST)
    whole = near.int()
    scaled = (_polynomial(near - whole.float(), gumbel.EXP2_MINUS) * 2.0**gumbel.WEIGHT_BITS).long()
    return torch.where(near < gumbel.FARTHEST, scaled >> whole.long(), 0)


def deviations(distance: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """How far each token's surprise lies from the entropy, times `scale` in binary orders: [..., C] float32

    distance: [..., C] ≥ 0 below the largest logit; weight: [..., C] int64, some of it above 0; scale: [..., 1] or one number
    """
    moments = (weight.float() * (distance * scale).clamp(max=gumbel.FARTHEST)).long()
    mean = moments.sum(-1, keepdim=True).double() / weight.sum(-1, keepdim=True).double()
    return (distance - (mean / scale.double()).float()).abs()
