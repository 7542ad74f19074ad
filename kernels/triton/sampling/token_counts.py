"""Token counts for penalties, on the device: which tokens a request contains, and how often it has generated each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 128
"""Rows of a program of four warps, one per thread."""


@triton.jit(do_not_specialize=["num_rows", "V"])
def count_tokens_kernel(slots, tokens, counts, num_rows, V, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < num_rows, other=-1).to(tl.int64)
    token = tl.load(tokens + row, mask=row < num_rows, other=-1)
    is_counted = (slot >= 0) & (token >= 0)
    count_ptrs = counts + slot * V + token
    tl.store(count_ptrs, (tl.load(count_ptrs, mask=is_counted, other=0) | 1) + 2, mask=is_counted)


def count_tokens(slots: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor) -> None:
    """counts[slots[i], tokens[i]] = (counts[slots[i], tokens[i]] | 1) + 2: one more in the output

    slots: [R] int32 or int64, below 0 is padding, distinct except for those whose counts do not matter; tokens: [R] int64 or
    int32, below 0 is none; counts: [S, V] int32 contiguous, see `SamplingColumns`, in place. Source: what the frequency and
    presence penalties of OpenAI's API count. Moves 20 bytes per row; two integer operations. Rows without a token are masked.
    """
    rows = slots.shape[0]
    if rows:
        count_tokens_kernel[(triton.cdiv(rows, ROWS),)](slots, tokens, counts, rows, counts.shape[1], ROWS=ROWS, num_warps=4)
