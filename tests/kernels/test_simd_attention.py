"""Paged attention compiled for this CPU: against the reference, and bit-identical in any batch."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch

from kernels import ops
from kernels.attention_rows import AttentionRow, AttentionShape
from kernels.paged_plan import PagedPlanner, paged_plan_attention
from kernels.reference import attention as reference_attention
from kernels.simd.attention_tile import CHUNK, HEAD_DIM_MAX
from kernels.simd.table import OPERATIONS
from kernels.simd.vectors import LANES

pytestmark = pytest.mark.usefixtures("threads")

CPU = torch.device("cpu")


def case(lens: Sequence[tuple[int, int]], shape: AttentionShape) -> tuple[torch.Tensor, torch.Tensor, list[AttentionRow]]:
    """Return queries, keys and values, a cache that is NaN elsewhere, and the rows. lens: (query_len, context_len) of each."""
    torch.manual_seed(1)
    size = shape.block_size
    counts = [-(-context // size) for _, context in lens]
    ids = list(range(sum(counts) + 3))
    random.Random(5).shuffle(ids)
    cache = torch.full((len(ids), size, 2, shape.num_kv_heads, shape.head_dim), math.nan)
    rows = [AttentionRow([ids.pop() for _ in range(count)], *pair) for count, pair in zip(counts, lens, strict=True)]
    for row in rows:
        for position in range(row.context_len):
            cache[row.block_table[position // size], position % size] = torch.randn(cache.shape[2:])
    qkv = torch.randn(sum(query_len for query_len, _ in lens), shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    return qkv, cache, rows


def attended(qkv: torch.Tensor, cache: torch.Tensor, rows: list[AttentionRow], shape: AttentionShape) -> torch.Tensor:
    plan = PagedPlanner(shape, device=CPU).plan(rows)
    return paged_plan_attention(OPERATIONS, qkv, cache, plan, None)


def compare(lens: Sequence[tuple[int, int]], shape: AttentionShape, *, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    qkv, cache, rows = case(lens, shape)
    before = cache.clone()
    expected = reference_attention.paged_attention(qkv, cache, rows, shape)
    torch.testing.assert_close(attended(qkv, cache, rows, shape), expected, rtol=rtol, atol=atol)
    assert torch.equal(torch.nan_to_num(cache, nan=7.0), torch.nan_to_num(before, nan=7.0)), "attention wrote to the cache"


MIXED = [(1, 33), (1, 17), (1, 16), (1, 15), (1, 1), (17, 17), (2, 16), (16, 33), (3, 20)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [
        *((heads, kv_heads, 64) for heads, kv_heads in ((4, 4), (4, 1), (12, 4), (8, 1), (9, 1), (24, 2))),
        *((4, 2, head_dim) for head_dim in (LANES, 64, 80, 96, HEAD_DIM_MAX)),
        (9, 1, 80),
        (24, 2, HEAD_DIM_MAX),
    ],
)
def test_awkward_lengths_match_the_reference(heads: int, kv_heads: int, head_dim: int) -> None:
    compare(MIXED, AttentionShape(16, heads, kv_heads, head_dim))


@pytest.mark.parametrize(
    ("block_size", "window"),
    [(1, None), (1, 7), (8, 1), (8, 7), (8, 16), (16, None), (16, 1), (16, 16), (16, 40), (32, 7), (32, 16), (32, 40)],
)
def test_windows_with_blocks_of_any_size_match_the_reference(block_size: int, window: int | None) -> None:
    compare([*MIXED, (1, 50), (5, 60)], AttentionShape(block_size, 4, 2, 32, sliding_window=window))


@pytest.mark.parametrize("window", [None, 100, 600])
@pytest.mark.parametrize("context", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 13])
def test_contexts_of_several_chunks_match_the_reference(context: int, window: int | None) -> None:
    compare([(1, context), (5, context)], AttentionShape(16, 4, 2, 32, sliding_window=window))


@pytest.mark.parametrize("window", [None, 7, 21])
def test_soft_capped_scores_with_a_custom_scale_match_the_reference(window: int | None) -> None:
    compare(MIXED, AttentionShape(16, 4, 2, 16, sliding_window=window, scale=0.4, softcap=1.5))
    compare(MIXED, AttentionShape(16, 4, 2, 16, sliding_window=window, scale=0.01, softcap=50.0))


def test_scores_far_apart_do_not_overflow() -> None:
    compare(MIXED, AttentionShape(16, 4, 2, 16, scale=200.0), rtol=1e-3, atol=1e-4)  # scores of thousands, four digits behind


def test_a_row_without_context_is_zero() -> None:
    shape = AttentionShape(16, 4, 2, 16)
    cache = torch.full((2, 16, 2, 2, 16), math.nan)
    lens, tables = torch.tensor([0], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    assert torch.equal(OPERATIONS.paged_decode(torch.randn(1, 4, 16), cache, tables, lens, shape), torch.zeros(1, 4, 16))


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (9, 1), (40, 1), (72, 2)])
def test_decodes_have_the_same_bits_with_any_number_of_threads(heads: int, kv_heads: int, window: int | None) -> None:
    shape = AttentionShape(16, heads, kv_heads, 32, sliding_window=window)
    lens = [CHUNK + 5, 3, 0, 40, 1, 1, 0, 77]
    qkv, cache, rows = case([(1, length) for length in lens], shape)
    queries = qkv[:, :heads].contiguous()
    tables = torch.zeros(len(lens), 40, dtype=torch.int32)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row.block_table)] = torch.tensor(row.block_table, dtype=torch.int32)
    outputs = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        out = torch.full_like(queries, math.nan)
        OPERATIONS.paged_decode(queries, cache, tables, torch.tensor(lens, dtype=torch.int32), shape, out=out)
        outputs.append(out)
    assert not outputs[0].isnan().any()
    assert all(torch.equal(each, outputs[0]) for each in outputs)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (9, 1)])
def test_a_query_has_the_same_bits_alone_and_in_any_chunk(heads: int, kv_heads: int, window: int | None) -> None:
    shape = AttentionShape(16, heads, kv_heads, 32, sliding_window=window)
    total = CHUNK + 37
    qkv, cache, (row,) = case([(total, total)], shape)
    whole = attended(qkv, cache, [row], shape)
    for first, end in ((total - 1, total), (CHUNK - 3, CHUNK + 4), (0, 1), (13, 100)):
        chunk = AttentionRow(row.block_table, end - first, end)
        decode = AttentionRow(row.block_table, 1, 40)
        found = attended(torch.cat((qkv[39:40], qkv[first:end])), cache, [decode, chunk], shape)
        assert torch.equal(found[1:], whole[first:end])
        assert torch.equal(found[:1], whole[39:40])


def test_formats_and_heads_choose_the_attention_implementation() -> None:
    def planner(head_dim: int, kv_dtype: torch.dtype | None = None, dtype: torch.dtype = torch.float32) -> str:
        shape = AttentionShape(16, 4, 2, head_dim)
        return type(ops.attention_planner(shape, dtype=dtype, device=CPU, kv_dtype=kv_dtype or dtype)).__name__

    assert planner(64) == planner(64, torch.float32) == "PagedPlanner"
    assert planner(LANES + 2) == planner(64, torch.float8_e4m3fn) == planner(64, dtype=torch.bfloat16) == "GatheredPlanner"
