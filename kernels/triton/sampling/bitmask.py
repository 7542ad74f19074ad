"""Applies a grammar's mask to logits in place: one bit per token, an int32 word for 32 of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, NUM_WARPS = 4096, 8
"""Logits of a program, 16 per thread, and its warps."""


@triton.jit(do_not_specialize=["logits_stride", "masks_stride", "V"])
def bitmask_kernel(logits, masks, rows, logits_stride, masks_stride, V, BLOCK: tl.constexpr):
    """Program (index, block): stores -inf where a bit is 0, or NaN where the logit was NaN or +inf, so that no mask hides a
    fault."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = ids < tl.where(row >= 0, V, 0)
    word = tl.load(masks + tl.program_id(0).to(tl.int64) * masks_stride + (ids >> 5), mask=mask, other=-1)
    forbidden = mask & (((word >> (ids & 31)) & 1) == 0)
    logit_ptrs = logits + row * logits_stride + ids
    value = tl.load(logit_ptrs, mask=forbidden, other=0.0).to(tl.float32)
    is_invalid = (value != value) | (value == float("inf"))
    value = tl.where(is_invalid, float("nan"), float("-inf"))
    tl.store(logit_ptrs, value.to(logits.dtype.element_ty), mask=forbidden)


def apply_bitmask(logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor) -> None:
    """logits[rows[i], t] = -inf for every token t whose bit in row i of the masks is 0; NaN where it was NaN or +inf

    logits: [R, V] float32, bf16 or fp16, changed in place; masks: [G, ceil(V / 32)] int32, bit b of word w allows token
    32 w + b; rows: [G] int32 or int64, below 0 is padding. Source: constrained decoding of arXiv 2307.09702. Reads V / 8 bytes
    of mask per row; reads and writes only forbidden logits, 4 operations each in float32. Tokens beyond V and rows of padding
    are masked. No accumulation.
    """
    vocab_size = logits.shape[1]
    if len(rows):
        bitmask_kernel[(len(rows), triton.cdiv(vocab_size, BLOCK))](
            logits, masks, rows, logits.stride(0), masks.stride(0), vocab_size, BLOCK=BLOCK, num_warps=NUM_WARPS
        )
