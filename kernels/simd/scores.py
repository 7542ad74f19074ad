"""Log-probabilities of chosen tokens and of the likeliest ones, as a table of integers: a row of logits at a time.

    row: rank of the token │ the token, the likeliest ones │ their log-probabilities, the bits of float64 as integers

log p(token) = logit − log Σ exp(logits), with sums of SPAN elements in float32, and their total in float64. The rank is one
more than the number of larger logits. The likeliest tokens are kept in order while the row is read, the first one on ties.
Reads a row three times, twice from the cache.
"""

from __future__ import annotations

import math

import numba
import torch
from numba import types
from numba.extending import intrinsic

from kernels.simd.compiling import entry, subroutine, task
from kernels.simd.launching import Launch
from kernels.simd.threads import argument, run, thread_range
from kernels.simd.vectors import (
    BYTES,
    INT64,
    LANES,
    element_pointer,
    exp,
    load_float32,
    load_int64,
    maximum,
    padded_load,
    reduce_max,
    reduce_sum,
    splat,
    store_int64,
    where_less,
)

SPAN = 4096


@intrinsic
def _store_float64(typing, address, index, value):
    """Store one float64; `index` counts elements of eight bytes."""

    def emit(context, builder, sig, args):
        address, index, value = args
        builder.store(builder.bitcast(value, INT64), element_pointer(builder, address, index, INT64), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float64), emit


@subroutine
def _find_row_max(x, size):
    lowest = splat(-math.inf)
    row_max = lowest
    for i in range(0, size, LANES):
        row_max = maximum(row_max, padded_load(x, i, size, lowest))
    return reduce_max(row_max)


@subroutine
def _log_sum(x, size, row_max):
    """log Σ exp(x), `row_max` being the largest."""
    lowest = splat(-math.inf)
    exp_sum = 0.0
    for first in range(0, size, SPAN):
        sums = splat(0.0)
        for i in range(first, min(size, first + SPAN), LANES):
            sums = sums + exp(padded_load(x, i, size, lowest) - splat(row_max))
        exp_sum += numba.float64(reduce_sum(sums))
    return numba.float64(row_max) + math.log(exp_sum)


@subroutine
def _num_larger(x, size, threshold):
    """The number of elements larger than `threshold`; counts in float32 are exact up to 2²⁴."""
    one, zero, lowest = splat(1.0), splat(0.0), splat(-math.inf)
    counts = zero
    for i in range(0, size, LANES):
        counts = counts + where_less(splat(threshold), padded_load(x, i, size, lowest), one, zero)
    return numba.int64(reduce_sum(counts))


@subroutine
def _insert(x, token, ids, count):
    """Insert a token into `count` ids that are sorted by logit, after the last one whose logit is not smaller."""
    index = count
    while index > 0 and load_float32(x, load_int64(ids, index - 1)) < load_float32(x, token):
        store_int64(ids, index, load_int64(ids, index - 1))
        index -= 1
    store_int64(ids, index, token)


@subroutine
def _find_likeliest(x, size, ids, count):
    """Write the ids of the `count` largest elements, in order; `ids` has room for one more."""
    for token in range(count):
        _insert(x, token, ids, token)
    lowest = splat(-math.inf)
    for i in range(count // LANES * LANES, size, LANES):
        threshold = load_float32(x, load_int64(ids, count - 1))
        if reduce_max(padded_load(x, i, size, lowest)) > threshold:
            for token in range(max(i, count), min(size, i + LANES)):
                if load_float32(x, token) > load_float32(x, load_int64(ids, count - 1)):
                    _insert(x, token, ids, count - 1)


@task
def _score_rows(a):
    logits, stride, size, tokens, num_top = argument(a, 0), argument(a, 1), argument(a, 2), argument(a, 3), argument(a, 4)
    out, out_stride = argument(a, 5), argument(a, 6)
    first, end = thread_range(a, argument(a, 7))
    for row in range(first, end):
        x, table, token = logits + row * stride * BYTES, out + row * out_stride * 8, load_int64(tokens, row)
        log_sum = _log_sum(x, size, _find_row_max(x, size))
        store_int64(table, 0, 1 + (_num_larger(x, size, load_float32(x, token)) if token >= 0 else 0))
        store_int64(table, 1, token)
        _find_likeliest(x, size, table + 16, num_top)
        for index in range(1 + num_top):
            table_token = load_int64(table, 1 + index)
            _store_float64(
                table,
                2 + num_top + index,
                numba.float64(load_float32(x, table_token)) - log_sum if table_token >= 0 else math.nan,
            )


@entry(11)
def _run(pool, threads, task, logits, stride, size, tokens, num_top, out, out_stride, num_rows):
    run(pool, threads, task, (logits, stride, size, tokens, num_top, out, out_stride, num_rows))


_score = Launch(_run, _score_rows, num_rows_at=7)

_OPERATIONS_PER_LOGIT = 8
"""Approximate work of a row, in operations per logit."""


def score_tokens(logits: torch.Tensor, tokens: torch.Tensor, num_top: int, *, out: torch.Tensor) -> None:
    """Write the table of log-probabilities.

    logits: [R, V] float32 as the model computed them; tokens: [R] int64, below 0 is none, which gets log-probability NaN and
    rank 1; 1 ≤ num_top ≤ V; out: [R, at least 3 + 2 · num_top] int64, whose first columns are the table
    """
    assert logits.dtype is torch.float32
    assert tokens.dtype is out.dtype is torch.int64
    num_rows, vocab_size = logits.shape
    _score(
        logits.numel() * _OPERATIONS_PER_LOGIT if num_rows > 1 else 0,
        logits.data_ptr(),
        logits.stride(0),
        vocab_size,
        tokens.data_ptr(),
        num_top,
        out.data_ptr(),
        out.stride(0),
        num_rows,
    )
