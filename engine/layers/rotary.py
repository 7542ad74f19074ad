"""Tables of rotary position embeddings (arXiv 2104.09864) with the scalings of `config.rope`."""

from __future__ import annotations

import math

import torch

from engine.config.rope import RopeConfig
from kernels import ops

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and signed sines of a batch's positions, each [T, 1, rotary_dim]."""


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
    """Long waves are stretched by `factor`, short ones kept, those between are blended."""
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_len / rope.low_freq_factor
    shortest = rope.original_max_len / rope.high_freq_factor
    smooth = (rope.original_max_len / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    return torch.where((wavelengths <= longest) & (wavelengths >= shortest), blended, stretched)


def _yarn(powers: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Pairs that turn often in the original context are kept, those that turn seldom stretched, a ramp between."""
    low, high = _turning_dim(rope.beta_fast, rope), _turning_dim(rope.beta_slow, rope)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low or 0.001
    kept = 1 - ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return (1 - kept) / (rope.factor * powers) + kept / powers


def _turning_dim(num_turns: float, rope: RopeConfig) -> float:
    """The dimension that turns `num_turns` times within the original context (equation 17 of YaRN)."""
    return rope.rotary_dim * math.log(rope.original_max_len / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))


class RotaryTable:
    """Cosines and sines of every position below `max_len`, ready for `rope_and_cache`.

    The sine's first half carries the minus sign of the rotation, so that the kernel needs no negation.
    """

    def __init__(self, rope: RopeConfig, max_len: int, *, dtype: torch.dtype, device: torch.device) -> None:
        angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inverse_frequencies(rope, max_len)[None, :]
        cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
        self._cos = torch.cat((cos, cos), dim=-1).to(device=device, dtype=dtype).unsqueeze(1)
        self._sin = torch.cat((-sin, sin), dim=-1).to(device=device, dtype=dtype).unsqueeze(1)
        self._ops = ops.operations(device, dtype)

    def at(self, positions: torch.Tensor) -> Rotation:
        """positions: [T] int64 → cos, signed sin: [T, 1, rotary_dim]"""
        return self._ops.rotation_rows(self._cos, self._sin, positions)
