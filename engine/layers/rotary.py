"""Tables of rotary position embeddings (arXiv 2104.09864), with linear (arXiv 2306.15595) and Llama 3.1 scaling."""

from __future__ import annotations

import math

import torch

from engine.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[D/2] float32: radians per position of each pair of dimensions."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    return _llama3(frequencies, rope) if rope.kind == "llama3" else frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between are blended."""
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_len / rope.low_freq_factor
    shortest = rope.original_max_len / rope.high_freq_factor
    smooth = (rope.original_max_len / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    return torch.where((wavelengths <= longest) & (wavelengths >= shortest), blended, stretched)


class RotaryTable:
    """Cosines and sines of every position below `max_len`, ready for `kernels.ops.rope`.

    The sine's first half carries the minus sign of the rotation, so that the kernel needs no negation.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, max_len: int, *, dtype: torch.dtype, device: torch.device) -> None:
        angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inverse_frequencies(rope, head_dim)[None, :]
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), dim=-1).to(device=device, dtype=dtype).unsqueeze(1)
        self._sin = torch.cat((-sin, sin), dim=-1).to(device=device, dtype=dtype).unsqueeze(1)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: [T] int64 → cos, signed sin: [T, 1, D]"""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)
