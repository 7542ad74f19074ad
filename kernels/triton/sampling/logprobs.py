"""Log-probabilities of a few tokens of each row: log-sum-exp in one pass, without writing all log-probabilities.

Formula. logprob(t) = x_t − log Σ exp(x), and rank(t) = 1 + how many logits are larger than x_t. Rows are split over programs
(`partial_logprobs`), each with its largest logit, its sum of exp2((x − largest) · log2(e)) and its count of larger logits;
`merge_logprobs` merges the splits, as in online softmax (arXiv 1805.02867). Every logit is read once; 12 bytes per split are
written. float32 sums, in an order that does not depend on the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.launching.card_properties import LOG2_E, power_of_two

IDS_MIN = 32
"""The least number of tokens per row, if more than one, that `merge_logprobs` is compiled for: few variants serve all."""
BLOCK, NUM_WARPS = 2048, 8
"""Logits of a step of a program, eight per thread, and its warps."""
_SPLIT_BLOCKS = 2  # steps of a split, for any number of rows, so that the order of a row's sum is fixed
_LOG2_E = tl.constexpr(LOG2_E)
_LN_2 = tl.constexpr(1.0 / LOG2_E)


@triton.jit(do_not_specialize=["logits_stride", "ids_stride", "V", "blocks"], do_not_specialize_on_alignment=["sums"])
def partial_logprobs_kernel(logits, ids, maxima, sums, larger, logits_stride, ids_stride, V, blocks, BLOCK: tl.constexpr):
    """Program (row, split): largest logit, sum and count of a split; -inf and 0 if it has nothing above -inf."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    target = tl.load(ids + row * ids_stride)
    threshold = tl.load(logits + row * logits_stride + target, mask=target >= 0, other=float("inf")).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    for block in range(split * blocks, tl.minimum((split + 1) * blocks, tl.cdiv(V, BLOCK))):
        token = lane + block * BLOCK
        value = tl.load(logits + row * logits_stride + token, mask=token < V, other=float("-inf")).to(tl.float32)
        count += (value > threshold).to(tl.int32)
        new_largest = tl.maximum(largest, value)
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        total = total * tl.exp2((largest - base) * _LOG2_E) + tl.exp2((value - base) * _LOG2_E)
        largest = new_largest
    top = tl.max(largest, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    offset = row * tl.num_programs(1) + split
    tl.store(maxima + offset, top)
    tl.store(sums + offset, tl.sum(total * tl.exp2((largest - base) * _LOG2_E), 0))
    tl.store(larger + offset, tl.sum(count, 0))


@triton.jit(do_not_specialize=["logits_stride", "ids_stride", "num_ids", "splits"], do_not_specialize_on_alignment=["sums"])
def merge_logprobs_kernel(
    logits, ids, maxima, sums, larger, logprobs, ranks,
    logits_stride, ids_stride, num_ids, splits, SPLITS: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """Program (row): the log-sum-exp, then the log-probabilities of the requested tokens and the rank of the first."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    mask = split < splits
    largest = tl.load(maxima + row * splits + split, mask=mask, other=float("-inf"))
    total = tl.load(sums + row * splits + split, mask=mask, other=0.0)
    top = tl.max(largest, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    log_sum = base + tl.log2(tl.sum(total * tl.exp2((largest - base) * _LOG2_E), 0)) * _LN_2
    index = tl.arange(0, IDS)
    token = tl.load(ids + row * ids_stride + index, mask=index < num_ids, other=-1)
    value = tl.load(logits + row * logits_stride + token, mask=token >= 0, other=float("nan")).to(tl.float32)
    tl.store(logprobs + row * num_ids + index, value - log_sum, mask=index < num_ids)
    tl.store(ranks + row, 1 + tl.sum(tl.load(larger + row * splits + split, mask=mask, other=0), 0))


def token_logprobs(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits[r, ids[r, n]] - log Σ_t exp(logits[r, t]): [R, N] float32, and 1 + how many logits are above the first: [R] int32

    logits: [R, V] float32, bf16 or fp16, not changed; ids: [R, N] int64 or int32, below 0 is none: NaN, and rank 1.

    Source, memory and order of sums: see the module. Some 12 operations per logit. Tokens beyond V and ids beyond N are masked.
    """
    (rows, vocab_size), num_ids = logits.shape, ids.shape[1]
    blocks = triton.cdiv(vocab_size, BLOCK)
    splits = triton.cdiv(blocks, _SPLIT_BLOCKS)
    maxima, sums = torch.empty(2, rows, splits, dtype=torch.float32, device=logits.device)
    larger = torch.empty(rows, splits, dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(rows, num_ids, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        strides = (logits.stride(0), ids.stride(0))
        partial_logprobs_kernel[(rows, splits)](
            logits, ids, maxima, sums, larger, *strides, vocab_size, _SPLIT_BLOCKS,
            BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        merge_logprobs_kernel[(rows,)](
            logits, ids, maxima, sums, larger, logprobs, ranks, *strides, num_ids, splits,
            SPLITS=power_of_two(splits), IDS=1 if num_ids == 1 else max(IDS_MIN, power_of_two(num_ids)), num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip
    return logprobs, ranks
