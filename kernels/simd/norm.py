"""RMS normalisation (arXiv 1910.07467), alone or after the residual sum that precedes it in a layer; a row at a time.

A sum of squares is computed as LANES partial sums in float32, added up half with half. Reads and writes each row once; the
second pass over it is from the cache.
"""

from __future__ import annotations

import math

import numba
import torch

from kernels.simd.compiling import entry, part, task
from kernels.simd.launching import Launch, new
from kernels.simd.threads import argument, bits, number, run, share
from kernels.simd.vectors import BYTES, LANES, fma, load_part, splat, store_part, total


@part
def inverse_root(squares, size, eps):
    """1 / √(mean + eps) of a vector of partial sums of squares."""
    return numba.float32(1.0) / numba.float32(math.sqrt(total(squares) / numba.float32(size) + eps))


@part
def sum_of_squares(x, size):
    """Partial sums of the squares of `size` numbers."""
    squares = splat(numba.float32(0.0))
    for i in range(0, size, LANES):
        value = load_part(x, i, size)
        squares = fma(value, value, squares)
    return squares


@part
def scale_row(x, weight, out, size, factor):
    """out = x · factor · weight; out may be x."""
    for i in range(0, size, LANES):
        store_part(out, i, size, load_part(x, i, size) * splat(factor) * load_part(weight, i, size))


@task
def _norms(a):
    x, weight, out = argument(a, 0), argument(a, 1), argument(a, 2)
    size, eps = argument(a, 4), number(argument(a, 5))
    first, end = share(a, argument(a, 3))
    for row in range(first, end):
        line = row * size * BYTES
        scale_row(x + line, weight, out + line, size, inverse_root(sum_of_squares(x + line, size), size, eps))


@entry(8, 1)
def _run_norms(pool, threads, task, x, weight, out, num_rows, size, eps):
    run(pool, threads, task, (x, weight, out, num_rows, size, bits(eps)))


@part
def _add_row(x, residual, branch_weight, out, size, eps, alpha):
    """out = residual + alpha · x, with x itself normalised if it has a weight. Returns the partial sums of out's squares."""
    factor = splat(alpha)
    if branch_weight:
        factor = splat(alpha * inverse_root(sum_of_squares(x, size), size, eps))
    squares = splat(numba.float32(0.0))
    for i in range(0, size, LANES):
        value = load_part(x, i, size)
        if branch_weight:
            value = value * load_part(branch_weight, i, size)
        value = fma(value, factor, load_part(residual, i, size))
        store_part(out, i, size, value)
        squares = fma(value, value, squares)
    return squares


@task
def _sums(a):
    x, residual, branch_weight, weight = argument(a, 0), argument(a, 1), argument(a, 2), argument(a, 3)
    sums, out, size = argument(a, 4), argument(a, 5), argument(a, 7)
    eps, alpha = number(argument(a, 8)), number(argument(a, 9))
    first, end = share(a, argument(a, 6))
    for row in range(first, end):
        line = row * size * BYTES
        squares = _add_row(x + line, residual + line, branch_weight, sums + line, size, eps, alpha)
        if weight:
            scale_row(sums + line, weight, out + line, size, inverse_root(squares, size, eps))


@entry(11, 2)
def _run_sums(pool, threads, task, x, residual, branch_weight, weight, sums, out, num_rows, size, eps, alpha):
    run(pool, threads, task, (x, residual, branch_weight, weight, sums, out, num_rows, size, bits(eps), bits(alpha)))


_norm = Launch(_run_norms, _norms, rows_at=3, num_floats=1)
_add_norm = Launch(_run_sums, _sums, rows_at=6, num_floats=2)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS normalisation. x: [..., hidden] float32, weight: [hidden] → [..., hidden]"""
    x = x.contiguous()
    out = new(*x.shape)
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
    sums = new(*x.shape)
    out = sums if weight is None else new(*x.shape)
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
