"""Log-probabilities of chosen tokens and of the likeliest ones, as a table of integers: a row of logits at a time.

    row: rank of the token │ the token, the likeliest ones │ their log-probabilities, the bits of float64 as integers

log p(token) = logit − log Σ exp(logits), with sums of SPAN numbers in float32 and the sum of these in float64. The rank is one
more than the number of larger logits. The likeliest are kept in order while the row is read, on ties the first. Reads a row
three times, twice from the cache.
"""

from __future__ import annotations

import math

import numba
import torch
from numba import types
from numba.extending import intrinsic

from kernels.simd.compiling import entry, part, task
from kernels.simd.launching import Launch
from kernels.simd.threads import argument, run, share
from kernels.simd.vectors import (
    BYTES,
    INT64,
    LANES,
    exp,
    first_lanes,
    get,
    get_int64,
    largest,
    load_part,
    maximum,
    place,
    put_int64,
    splat,
    total,
    where_less,
)

SPAN = 4096


@intrinsic
def _put_float64(typing, address, index, value):
    """Write one number of eight bytes; `index` counts these."""

    def emit(context, builder, sig, args):
        address, index, value = args
        builder.store(builder.bitcast(value, INT64), place(builder, address, index, INT64), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float64), emit


@part
def _end_of(x, i, size, other):
    """LANES numbers from element i on, with `other` beyond the end of the row."""
    return first_lanes(load_part(x, i, size), size - i, other)


@part
def _largest_of(x, size):
    lowest = splat(numba.float32(-math.inf))
    found = lowest
    for i in range(0, size, LANES):
        found = maximum(found, _end_of(x, i, size, lowest))
    return largest(found)


@part
def _log_sum(x, size, most):
    """log Σ exp(x), `most` being the largest."""
    lowest = splat(numba.float32(-math.inf))
    found = 0.0
    for first in range(0, size, SPAN):
        sums = splat(numba.float32(0.0))
        for i in range(first, min(size, first + SPAN), LANES):
            sums = sums + exp(_end_of(x, i, size, lowest) - splat(most))
        found += numba.float64(total(sums))
    return numba.float64(most) + math.log(found)


@part
def _num_larger(x, size, own):
    """How many numbers are larger than `own`; counts in float32 are exact up to 2²⁴."""
    one, zero, lowest = splat(numba.float32(1.0)), splat(numba.float32(0.0)), splat(numba.float32(-math.inf))
    found = zero
    for i in range(0, size, LANES):
        found = found + where_less(splat(own), _end_of(x, i, size, lowest), one, zero)
    return numba.int64(total(found))


@part
def _insert(x, token, ids, kept):
    """Insert a token after the last of `kept` ordered ones whose logit is not smaller."""
    at = kept
    while at > 0 and get(x, get_int64(ids, at - 1)) < get(x, token):
        put_int64(ids, at, get_int64(ids, at - 1))
        at -= 1
    put_int64(ids, at, token)


@part
def _find_likeliest(x, size, ids, count):
    """Ids of the `count` largest numbers, in order; there is room for one more."""
    for token in range(count):
        _insert(x, token, ids, token)
    lowest = splat(numba.float32(-math.inf))
    for i in range(count // LANES * LANES, size, LANES):
        least = get(x, get_int64(ids, count - 1))
        if largest(_end_of(x, i, size, lowest)) > least:
            for token in range(max(i, count), min(size, i + LANES)):
                if get(x, token) > get(x, get_int64(ids, count - 1)):
                    _insert(x, token, ids, count - 1)


@task
def _tables(a):
    logits, stride, size, tokens, num_top = argument(a, 0), argument(a, 1), argument(a, 2), argument(a, 3), argument(a, 4)
    out, out_stride = argument(a, 5), argument(a, 6)
    first, end = share(a, argument(a, 7))
    for row in range(first, end):
        x, table, token = logits + row * stride * BYTES, out + row * out_stride * 8, get_int64(tokens, row)
        totals = _log_sum(x, size, _largest_of(x, size))
        put_int64(table, 0, 1 + (_num_larger(x, size, get(x, token)) if token >= 0 else 0))
        put_int64(table, 1, token)
        _find_likeliest(x, size, table + 16, num_top)
        for index in range(1 + num_top):
            each = get_int64(table, 1 + index)
            _put_float64(table, 2 + num_top + index, numba.float64(get(x, each)) - totals if each >= 0 else math.nan)


@entry(11)
def _run(pool, threads, task, logits, stride, size, tokens, num_top, out, out_stride, num_rows):
    run(pool, threads, task, (logits, stride, size, tokens, num_top, out, out_stride, num_rows))


_score = Launch(_run, _tables, rows_at=7)

_PASSES = 8
"""Approximate work of a row, in operations per number."""


def score_tokens(logits: torch.Tensor, tokens: torch.Tensor, num_top: int, *, out: torch.Tensor) -> None:
    """Write the table of log-probabilities.

    logits: [R, V] float32 as the model computed them; tokens: [R] int64, below 0 is none, which gets log-probability NaN and
    rank 1; 1 ≤ num_top ≤ V; out: [R, at least 3 + 2 · num_top] int64, whose first columns are the table
    """
    assert logits.dtype is torch.float32
    assert tokens.dtype is out.dtype is torch.int64
    num_rows, vocab_size = logits.shape
    _score(
        logits.numel() * _PASSES if num_rows > 1 else 0,
        logits.data_ptr(),
        logits.stride(0),
        vocab_size,
        tokens.data_ptr(),
        num_top,
        out.data_ptr(),
        out.stride(0),
        num_rows,
    )
