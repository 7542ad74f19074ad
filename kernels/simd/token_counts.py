"""Token counts for the penalties, see `kernels.sampling_columns`."""

from __future__ import annotations

import torch

from kernels.simd.compiling import entry, task
from kernels.simd.launching import Launch
from kernels.simd.threads import argument, run, thread_range
from kernels.simd.vectors import load_int32, load_int64, store_int32


@task
def _count_rows(a):
    slots, tokens, counts, vocab_size = argument(a, 0), argument(a, 1), argument(a, 2), argument(a, 4)
    first, end = thread_range(a, argument(a, 3))
    for row in range(first, end):
        slot, token = load_int32(slots, row), load_int64(tokens, row)
        if slot >= 0 and token >= 0:
            index = slot * vocab_size + token
            store_int32(counts, index, (load_int32(counts, index) | 1) + 2)


@entry(8)
def _run(pool, threads, task, slots, tokens, counts, num_rows, vocab_size):
    run(pool, threads, task, (slots, tokens, counts, num_rows, vocab_size))


_count = Launch(_run, _count_rows, num_rows_at=3)


def count_tokens(slots: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor) -> None:
    """Count the tokens of a step.

    slots: [R] int32, below 0 is padding, no slot twice if its counts matter; tokens: [R] int64, below 0 is none; counts: [S, V]
    int32, in place
    """
    assert slots.dtype is counts.dtype is torch.int32
    assert tokens.dtype is torch.int64
    _count(slots.numel(), slots.data_ptr(), tokens.data_ptr(), counts.data_ptr(), slots.shape[0], counts.shape[1])
