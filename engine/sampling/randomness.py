"""Randomness of sampling as a function of (seed, position), independent of where and with what a request runs. No torch.

64 bits per sampled token, from two rounds of the SplitMix64 finaliser (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
Generators, OOPSLA 2014), which passes BigCrush as a counter-based generator. They key the Gumbel-max noise that draws the
token (`kernels.gumbel`). So a replayed or preempted request draws exactly the tokens that it would have drawn otherwise.
"""

from __future__ import annotations

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_STREAM_OF_ANSWERS = 0xD1B54A32D192ED03  # odd and different from _GAMMA, so that answers share no stream with positions
_SEED_BITS = 63


def stream(seed: int, *, draw: int = 0) -> int:
    """The state from which all random bits of a seed are derived: 64 bits.

    If a token takes random bits more than once (a draft is judged, then replaced), `draw` counts the times from 0.
    """
    start = _mix((seed + _GAMMA) & _MASK)
    return _mix((start + draw) & _MASK) if draw else start


def key(seed: int, position: int, *, draw: int = 0) -> int:
    """64 random bits for one token; `position` is its index in prompt plus output."""
    return _mix((stream(seed, draw=draw) + _GAMMA * (position + 1)) & _MASK)


def signed(bits: int) -> int:
    """64 bits as an int64 with the same bits."""
    return bits - 2**64 if bits >= 2**63 else bits


def seed_of_answer(seed: int, index: int) -> int:
    """The seed of answer `index` of a request: its own for the first one, mixed with the index for the others."""
    if not index:
        return seed
    return _mix((_mix((seed + _GAMMA) & _MASK) + _STREAM_OF_ANSWERS * index) & _MASK) >> (64 - _SEED_BITS)


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
