"""Kernels address elements more than 2³¹ beyond the start of a tensor, where 32-bit offsets overflow.

The result of a call is the same wherever its rows and blocks are; only the pages that it touches are allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType

import pytest
import torch

from kernels.attention_rows import AttentionShape
from kernels.sampling_columns import SamplingColumns
from kernels.triton.attention import decode as attention_decode
from kernels.triton.attention import prefill as attention_prefill
from kernels.triton.attention.rope_and_cache import rope_and_cache
from kernels.triton.attention.rotated_decode import rotated_decode
from kernels.triton.attention.splits import DecodeWorkspace
from kernels.triton.invariant import attention as invariant_attention
from kernels.triton.products.linear import linear
from kernels.triton.sampling import greedy_head
from kernels.triton.sampling import sampler as sampling
from kernels.triton.sampling.bitmask import apply_bitmask
from kernels.triton.sampling.logprobs import token_logprobs
from kernels.triton.sampling.token_counts import count_tokens
from kernels.triton.step.blocks import copy_blocks, gather_blocks, scatter_blocks
from kernels.triton.step.embedding import embed
from tests.support.far_memory import FAR, far_blocks, untouched
from tests.support.kernel_cases import normal
from tests.support.kernel_tolerances import assert_same

LARGE_VOCABULARY = 262_208
SHAPE = AttentionShape(16, 4, 2, 64)
BLOCK_SHAPE = (SHAPE.block_size, 2, SHAPE.num_kv_heads, SHAPE.head_dim)


def far_apart(rows: torch.Tensor) -> torch.Tensor:
    """rows: [R, …] → the same values as a view whose last row begins FAR elements after the first."""
    stride = -(-FAR // (rows.shape[0] - 1) // 64) * 64
    memory = untouched(stride * (rows.shape[0] - 1) + rows[0].numel(), dtype=rows.dtype, device=rows.device)
    far = memory.as_strided(rows.shape, (stride, *rows.stride()[1:]))
    far.copy_(rows)
    return far


def integers(*numbers: int, device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("kernels", [attention_decode, invariant_attention])
def test_decodes_read_far_blocks(kernels: ModuleType, dtype: torch.dtype, device: torch.device) -> None:
    near = normal(3, *BLOCK_SHAPE, dtype=torch.float32, device=device).to(dtype)
    far, first = far_blocks(near)
    tables, lengths = integers(2, 0, 1, device=device).view(1, 3), integers(41, device=device)
    q = normal(1, SHAPE.num_heads, SHAPE.head_dim, dtype=torch.float16, device=device, seed=1)
    expected = kernels.paged_decode(q, near, tables, lengths, SHAPE)
    assert_same(kernels.paged_decode(q, far, tables + first, lengths, SHAPE), expected)


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("kernels", [attention_prefill, invariant_attention])
def test_chunks_read_far_blocks_for_far_queries(kernels: ModuleType, window: int | None, device: torch.device) -> None:
    near = normal(3, *BLOCK_SHAPE, dtype=torch.float16, device=device)
    far, first = far_blocks(near)
    tables, lengths = integers(2, 0, 1, device=device).view(1, 3), integers(41, device=device)
    starts, shape = integers(0, 10, device=device), replace(SHAPE, sliding_window=window)
    q = normal(10, SHAPE.num_heads, SHAPE.head_dim, dtype=torch.float16, device=device, seed=1)
    expected = kernels.paged_prefill(q, near, tables, starts, lengths, shape, max_query_len=10)
    found = kernels.paged_prefill(far_apart(q), far, tables + first, starts, lengths, shape, max_query_len=10)
    assert_same(found, expected)


@pytest.mark.parametrize("lengths", [(41,), (41, 5)])
def test_decodes_with_their_rotation_read_and_write_far_blocks(lengths: tuple[int, ...], device: torch.device) -> None:
    """One request is served by `lone_decode`."""
    rows, size = len(lengths), SHAPE.head_dim
    near = normal(4, *BLOCK_SHAPE, dtype=torch.float16, device=device)
    far, first = far_blocks(near)
    qkv = normal(rows, SHAPE.num_heads + 2 * SHAPE.num_kv_heads, size, dtype=torch.float16, device=device, seed=1)
    angles = normal(rows, 1, size, dtype=torch.float16, device=device, seed=2)
    tables = integers(2, 0, 1, 3, 0, 0, device=device).view(2, 3)[:rows]
    slots = integers(1 * SHAPE.block_size + 8, 3 * SHAPE.block_size + 4, device=device)[:rows]
    results = [
        rotated_decode(
            qkv, angles, angles, cache, slots + begin * SHAPE.block_size, tables + begin,
            integers(*lengths, device=device), SHAPE, rotary_dim=size,
        )
        for cache, begin in ((near, 0), (far, first))
    ]  # fmt: skip
    assert_same(results[1], results[0])
    assert_same(far[first:], near)


def test_partial_results_are_stored_at_far_offsets(device: torch.device) -> None:
    """Three rows of one request and one of another, FAR elements apart."""
    lengths, heads, size = (600, 530), SHAPE.num_heads, SHAPE.head_dim
    cache = normal(40, *BLOCK_SHAPE, dtype=torch.float16, device=device)
    tables = torch.arange(40, device=device).roll(7).view(1, 40).expand(2, 40).int()
    q = normal(4, heads, size, dtype=torch.float16, device=device, seed=1)
    starts = integers(0, 3, 4, device=device)
    splits = FAR // (heads * size)
    room = [untouched(4, splits, heads, *numbers, dtype=torch.float32, device=device) for numbers in ((size,), ())]
    decode = partial(
        attention_decode.paged_decode, q, cache, tables, integers(*lengths, device=device), SHAPE,
        query_starts=starts, max_query_len=4,
    )  # fmt: skip
    assert_same(decode(workspace=DecodeWorkspace(*room)), decode())


def test_far_rows_are_rotated_and_written_to_far_blocks(device: torch.device) -> None:
    heads, size = 4 + 2 * 2, SHAPE.head_dim
    near_qkv = normal(3, heads, size, dtype=torch.float16, device=device)
    angles = normal(3, 1, size, dtype=torch.float16, device=device, seed=1)
    near = torch.zeros(3, *BLOCK_SHAPE, dtype=torch.float16, device=device)
    (far, first), far_qkv = far_blocks(near), far_apart(near_qkv)
    slots = integers(20, 3, 47, device=device, dtype=torch.int64)
    for qkv, cache, places in ((near_qkv, near, slots), (far_qkv, far, slots + first * SHAPE.block_size)):
        rope_and_cache(qkv, angles, angles, cache, places, num_kv_heads=2, rotary_dim=size)
    assert_same(far_qkv, near_qkv)
    assert_same(far[first:], near)


def test_far_blocks_are_copied_and_staged_in_far_rows(device: torch.device) -> None:
    """FAR in words of eight bytes."""
    blocks = normal(3, 64, dtype=torch.float32, device=device).view(torch.int64)
    caches = [far_apart(blocks), far_apart(blocks + 1)]
    copy_blocks(caches, integers(0, device=device), integers(2, device=device))
    first = FAR // 64 + 1
    staging, row = untouched(first + 1, 2, 32, dtype=torch.int64, device=device), integers(first, device=device)
    gather_blocks(caches, integers(2, device=device), staging, row)
    assert torch.equal(staging[first], torch.stack((blocks[0], blocks[0] + 1)))
    scatter_blocks(caches, integers(1, device=device), staging, row)
    copy_blocks(caches, integers(2, device=device), integers(0, device=device))
    for cache, expected in zip(caches, (blocks, blocks + 1), strict=True):
        assert torch.equal(cache, expected[0].expand(3, -1))


def test_the_last_rows_of_a_large_embedding_are_read(device: torch.device) -> None:
    width = FAR // (LARGE_VOCABULARY - 1) + 1
    table = untouched(LARGE_VOCABULARY, width, dtype=torch.float16, device=device)
    table[-1] = normal(width, dtype=torch.float16, device=device)
    assert_same(embed(integers(LARGE_VOCABULARY - 1, device=device), table)[0], table[-1])


def far_outputs(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """→ a matrix whose rows are 2²⁰ elements apart, so that the last ones are far; an input whose largest output is the last"""
    outputs, stride = FAR // 2**20 + 16, 2**20
    memory = untouched((outputs - 1) * stride + 32, dtype=torch.float16, device=device)
    weight = memory.as_strided((outputs, 32), (stride, 1))
    weight.zero_()
    weight[-1] = 1.0
    return weight, torch.ones(1, 32, dtype=torch.float16, device=device)


def test_products_read_far_rows_of_a_weight(device: torch.device) -> None:
    weight, x = far_outputs(device)
    assert linear(x, weight)[0, -1] == 32.0
    assert greedy_head.greedy_head(x, weight).tolist() == [weight.shape[0] - 1]


def drawn(logits: torch.Tensor, columns: SamplingColumns, slots: torch.Tensor) -> list[int]:
    return sampling.sample(logits, slots, integers(5, 6, 7, device=logits.device, dtype=torch.int64), columns).tolist()


def masked(logits: torch.Tensor) -> torch.Tensor:
    masks = far_apart(integers(*[0x0F0F0F0F] * 16, device=logits.device).view(2, 8))
    apply_bitmask(logits, masks, integers(0, 2, device=logits.device))
    return logits


@pytest.mark.parametrize(
    "judge", [lambda logits: token_logprobs(logits, torch.full((3, 2), 255, device=logits.device))[0], masked]
)
def test_far_rows_of_logits_are_sampled_and_masked(judge: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
    logits = normal(3, 256, dtype=torch.float32, device=device)
    far = far_apart(logits)
    assert_same(judge(far), judge(logits))


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_tokens_are_drawn_from_far_rows_by_far_counts_and_biases(top_p: float, device: torch.device) -> None:
    vocab_size = 4096
    near = SamplingColumns.empty(3, vocab_size, 1, device)
    near.scale[:], near.top_p[:], near.frequency[:] = 1.0, top_p, 1.0
    first = FAR // vocab_size + 1
    counts = untouched(first + 3, vocab_size, dtype=torch.int32, device=device)
    bias = untouched(first + 1, vocab_size, dtype=torch.float32, device=device)
    far = replace(SamplingColumns.empty(first + 3, 1, 1, device), counts=counts, bias=bias)
    far.scale[:], far.top_p[:], far.frequency[:] = 1.0, top_p, 1.0
    near.rules[2], far.rules[first + 2] = 0, first
    for columns, rule, slot in ((near, 0, 0), (far, first, first)):
        columns.bias[rule, 1000:] = -math.inf
        count_tokens(integers(slot, device=device), integers(7, device=device, dtype=torch.int64), columns.counts)
        columns.streams[slot : slot + 3] = integers(11, 12, 13, device=device, dtype=torch.int64)
    assert near.counts[0, 7] == far.counts[first, 7] == 3
    logits = normal(3, vocab_size, dtype=torch.float32, device=device) * 4
    slots = integers(0, 1, 2, device=device)
    expected = drawn(logits, near, slots)
    assert expected[2] < 1000
    assert drawn(far_apart(logits), far, slots + first) == expected
