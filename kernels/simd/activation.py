"""Gated activations of a feed-forward layer (arXiv 2002.05202): read both halves of each row once, write their product."""

from __future__ import annotations

import torch

from kernels.simd.compiling import entry, subroutine, task
from kernels.simd.launching import Launch, empty
from kernels.simd.threads import argument, run, thread_range
from kernels.simd.vectors import BYTES, LANES, exp, fma, masked_load, masked_store, splat

SILU, GELU_TANH = 0, 1

_SQRT_2_OVER_PI, _CUBIC = 0.7978845608028654, 0.044715  # √(2 / π) and the factor of x³ (arXiv 1606.08415)


@subroutine
def _sigmoid(x):
    one = splat(1.0)
    return one / (one + exp(splat(0.0) - x))


@subroutine
def _gelu(x):
    """x · σ(2 · √(2 / π) · (x + 0.044715 · x³)): the tanh approximation, written without a subtraction."""
    inner = fma(x * x * x, splat(_CUBIC), x)
    return x * _sigmoid(inner * splat(2 * _SQRT_2_OVER_PI))


@task
def _gate_rows(a):
    x, out, size, activation = argument(a, 0), argument(a, 1), argument(a, 3), argument(a, 4)
    first, end = thread_range(a, argument(a, 2))
    for row in range(first, end):
        gate, up, target = x + row * 2 * size * BYTES, x + (2 * row + 1) * size * BYTES, out + row * size * BYTES
        for i in range(0, size, LANES):
            value = masked_load(gate, i, size)
            value = _gelu(value) if activation else value * _sigmoid(value)
            masked_store(target, i, size, value * masked_load(up, i, size))


@entry(8)
def _run(pool, threads, task, x, out, num_rows, size, activation):
    run(pool, threads, task, (x, out, num_rows, size, activation))


_gate = Launch(_run, _gate_rows, num_rows_at=2)


def _gated(gate_up: torch.Tensor, activation: int) -> torch.Tensor:
    gate_up = gate_up.contiguous()
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = empty(num_rows, size)
    # an exponential costs as much as a dozen other operations; a single row is not split
    work = num_rows * size * 8 if num_rows > 1 else 0
    _gate(work, gate_up.data_ptr(), out.data_ptr(), num_rows, size, activation)
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU gate. gate_up: [T, 2·inner] float32 → silu(gate) · up: [T, inner]"""
    return _gated(gate_up, SILU)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """GELU gate. gate_up: [T, 2·inner] float32 → gelu(gate) · up: [T, inner], gelu by its tanh approximation"""
    return _gated(gate_up, GELU_TANH)
