"""RMS normalisation (arXiv 1910.07467), alone or after the residual sum that precedes it in a layer; a row at a time.

A sum of squares is computed as LANES partial sums in float32, which are then added by halving. Reads and writes each row once;
the second pass over it is from the cache.
"""

from __future__ import annotations

import math

import numba
import torch

from kernels.simd.compiling import entry, subroutine, task
from kernels.simd.launching import Launch, empty
from kernels.simd.threads import argument, float_argument, run, thread_range
from kernels.simd.vectors import BYTES, LANES, fma, masked_load, masked_store, reduce_sum, splat


@subroutine
def inverse_rms(squares, size, eps):
    """1 / √(mean + eps) of a vector of partial sums of squares."""
    return numba.float32(1.0) / numba.float32(math.sqrt(reduce_sum(squares) / numba.float32(size) + eps))


@subroutine
def sum_of_squares(x, size):
    """Partial sums of the squares of `size` elements."""
    squares = splat(0.0)
    for i in range(0, size, LANES):
        value = masked_load(x, i, size)
        squares = fma(value, value, squares)
    return squares


@subroutine
def scale_row(x, weight, out, size, factor):
    """out = x · factor · weight; out may be x."""
    for i in range(0, size, LANES):
        masked_store(out, i, size, masked_load(x, i, size) * splat(factor) * masked_load(weight, i, size))


@task
def _normalise_rows(a):
    x, weight, out = argument(a, 0), argument(a, 1), argument(a, 2)
    size, eps = argument(a, 4), float_argument(a, 5)
    first, end = thread_range(a, argument(a, 3))
    for row in range(first, end):
        offset = row * size * BYTES
        scale_row(x + offset, weight, out + offset, size, inverse_rms(sum_of_squares(x + offset, size), size, eps))


@entry(8, 1)
def _run_norms(pool, threads, task, x, weight, out, num_rows, size, eps):
    run(pool, threads, task, (x, weight, out, num_rows, size, eps))


@subroutine
def _add_row(x, residual, branch_weight, out, size, eps, alpha):
    """out = residual + alpha · x, with x itself normalised if it has a weight. Returns the partial sums of out's squares."""
    factor = splat(alpha)
    if branch_weight:
        factor = splat(alpha * inverse_rms(sum_of_squares(x, size), size, eps))
    squares = splat(0.0)
    for i in range(0, size, LANES):
        value = masked_load(x, i, size)
        if branch_weight:
            value = value * masked_load(branch_weight, i, size)
        value = fma(value, factor, masked_load(residual, i, size))
        masked_store(out, i, size, value)
        squares = fma(value, value, squares)
    return squares


@task
def _add_and_normalise_rows(a):
    x, residual, branch_weight, weight = argument(a, 0), argument(a, 1), argument(a, 2), argument(a, 3)
    sums, out, size = argument(a, 4), argument(a, 5), argument(a, 7)
    eps, alpha = float_argument(a, 8), float_argument(a, 9)
    first, end = thread_range(a, argument(a, 6))
    for row in range(first, end):
        offset = row * size * BYTES
        squares = _add_row(x + offset, residual + offset, branch_weight, sums + offset, size, eps, alpha)
        if weight:
            scale_row(sums + offset, weight, out + offset, size, inverse_rms(squares, size, eps))


@entry(11, 2)
def _run_sums(pool, threads, task, x, residual, branch_weight, weight, sums, out, num_rows, size, eps, alpha):
    run(pool, threads, task, (x, residual, branch_weight, weight, sums, out, num_rows, size, eps, alpha))


_norm = Launch(_run_norms, _normalise_rows, num_rows_at=3, num_floats=1)
_add_norm = Launch(_run_sums, _add_and_normalise_rows, num_rows_at=6, num_floats=2)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS normalisation. x: [..., hidden] float32, weight: [hidden] → [..., hidden]"""
    x = x.contiguous()
    out = empty(*x.shape)
    count, size = x.numel(), weight.shape[0]
    _norm(count, x.data_ptr(), weight.data_ptr(), out.data_ptr(), count // size, size, eps)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    alpha: float = 1.0,
    branch_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual sum and its RMS normalisation.

    x, residual: [..., hidden] float32 → rms_norm(sum) · weight and sum = residual + alpha · x, both [..., hidden].

    With `branch_weight`, x itself is normalised before it is added. Without `weight` the first result is the sum too.
    """
    x, residual = x.contiguous(), residual.contiguous()
    sums = empty(*x.shape)
    out = sums if weight is None else empty(*x.shape)
    count, size = x.numel(), x.shape[-1]
    _add_norm(
        count,
        x.data_ptr(),
        residual.data_ptr(),
        0 if branch_weight is None else branch_weight.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        sums.data_ptr(),
        out.data_ptr(),
        count // size,
        size,
        eps,
        alpha,
    )
    return out, sums
