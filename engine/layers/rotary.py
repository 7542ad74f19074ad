"""Tables of rotary position embeddings (arXiv 2104.09864) with the scalings of `config.rope`."""

from __future__ import annotations

import math

import torch

from engine.config.rope import RopeConfig
from kernels import ops

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and signed sines of a batch's positions, each [T, 1, rotary_dim]."""


CHUNK_POSITIONS = 16_384
"""Positions whose angles are computed at a time, on the device: 4 MiB for heads of 128, independent of the context."""


def inverse_frequencies(rope: RopeConfig, max_len: int) -> torch.Tensor:
    """[rotary_dim / 2] float32: radians per position of each pair of dimensions, in an engine of `max_len` positions."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    powers = rope.theta**exponents
    if rope.kind == "linear":
        return 1.0 / powers / rope.factor
    if rope.kind == "llama3":
        return _llama3(1.0 / powers, rope)
    if rope.kind == "yarn":
        return _yarn(powers, rope)
    if rope.kind == "longrope":
        factors = rope.long_factors if max_len > rope.original_max_len else rope.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers)
    return 1.0 / powers


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between are blended."""
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_len / rope.low_freq_factor
    shortest = rope.original_max_len / rope.high_freq_factor
    smooth = (rope.original_max_len / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    return torch.where((wavelengths <= longest) & (wavelengths >= shortest), blended, stretched)


def _yarn(powers: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Pairs that rotate often in the original context are kept, those that rotate seldom are stretched, with a ramp between."""
    low, high = _correction_dim(rope.beta_fast, rope), _correction_dim(rope.beta_slow, rope)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low or 0.001
    extrapolation = 1 - ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return (1 - extrapolation) / (rope.factor * powers) + extrapolation / powers


def _correction_dim(num_rotations: float, rope: RopeConfig) -> float:
    """The dimension that makes `num_rotations` rotations within the original context (equation 17 of YaRN)."""
    return rope.rotary_dim * math.log(rope.original_max_len / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.theta))


class RotaryTable:
    """Cosines and sines of every position below `max_len`, ready for `rope_and_cache`.

    The sine's first half carries the minus sign of the rotation, so that the kernel needs no negation. Both tables are
    [max_len, 1, rotary_dim], of `dtype`, computed in float32.
    """

    def __init__(self, rope: RopeConfig, max_len: int, *, dtype: torch.dtype, device: torch.device) -> None:
        frequencies, half = inverse_frequencies(rope, max_len).to(device), rope.rotary_dim // 2
        self._cos = torch.empty(max_len, 1, rope.rotary_dim, dtype=dtype, device=device)
        self._sin = torch.empty_like(self._cos)
        for first in range(0, max_len, CHUNK_POSITIONS):
            positions = torch.arange(first, min(first + CHUNK_POSITIONS, max_len), dtype=torch.float32, device=device)
            angles = positions[:, None] * frequencies[None, :]
            cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
            chunk = slice(first, first + len(positions))
            for table, halves in ((self._cos, (cos, cos)), (self._sin, (-sin, sin))):
                table[chunk, 0, :half], table[chunk, 0, half:] = halves
        self._ops = ops.operations(device, dtype)

    @property
    def num_bytes(self) -> int:
        return self._cos.nbytes + self._sin.nbytes

    def at(self, positions: torch.Tensor) -> Rotation:
        """positions: [T] int64 → cos, signed sin: [T, 1, rotary_dim]"""
        return self._ops.rotation_rows(self._cos, self._sin, positions)
