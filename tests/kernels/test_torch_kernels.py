"""Operations in torch, and those that compiled vectors replace on CPUs, against float32 references: awkward shapes and
poisoned caches."""

from __future__ import annotations

import math
import random

import pytest
import torch

from kernels import ops
from kernels.attention_rows import AttentionRow, AttentionShape
from kernels.operations import Operations
from kernels.reference import activation as reference_activation
from kernels.reference import attention as reference_attention
from kernels.reference import experts as reference_experts
from kernels.reference import norm as reference_norm
from kernels.reference import rope_and_cache as reference_rope
from kernels.simd import table as simd_table
from kernels.torch import table as plain_table
from kernels.torch.rope_and_cache import rope_and_cache

BLOCK_SIZE = 16
CPU = torch.device("cpu")
TABLES = pytest.mark.parametrize("table", [plain_table.OPERATIONS, simd_table.OPERATIONS], ids=["torch", "simd"])

# Sums of up to a few hundred float32 products in another order: a few units in the last place of their largest term.
RELATIVE_TOLERANCE = 2e-5
ABSOLUTE_TOLERANCE = 2e-6


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=RELATIVE_TOLERANCE, atol=ABSOLUTE_TOLERANCE)


def poisoned_cache(num_blocks: int, kv_heads: int, head_dim: int) -> torch.Tensor:
    return torch.full((num_blocks, BLOCK_SIZE, 2, kv_heads, head_dim), math.nan)


def fill(cache: torch.Tensor, table: list[int], length: int) -> None:
    """Content for the first `length` tokens of a request; everything else stays NaN."""
    for position in range(length):
        cache[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = torch.randn(cache.shape[2:])


def tables(lengths: list[int]) -> tuple[list[list[int]], int]:
    """Scattered, disjoint block tables and the size of their pool; a table may be longer than its request needs."""
    counts = [-(-length // BLOCK_SIZE) + index % 2 for index, length in enumerate(lengths)]
    ids = list(range(sum(counts) + 3))
    random.Random(5).shuffle(ids)
    return [[ids.pop() for _ in range(count)] for count in counts], sum(counts) + 3


def compare_attention(rows: list[tuple[int, int]], shape: AttentionShape) -> None:
    """rows: (query_len, context_len)"""
    torch.manual_seed(1)
    block_tables, num_blocks = tables([context for _, context in rows])
    cache = poisoned_cache(num_blocks, shape.num_kv_heads, shape.head_dim)
    total = sum(query_len for query_len, _ in rows)
    qkv = torch.randn(total, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    planned = [AttentionRow(table, query_len, context) for table, (query_len, context) in zip(block_tables, rows, strict=True)]
    slots = []
    for row in planned:
        fill(cache, list(row.block_table), row.start)
        positions = range(row.start, row.context_len)
        slots += [row.block_table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in positions]
    reference_attention.write_kv(qkv[:, shape.num_heads :], cache, torch.tensor(slots))
    before = cache.clone()
    planner = ops.GatheredPlanner(shape, dtype=torch.float32, device=CPU)
    attended = ops.paged_attention(plain_table.OPERATIONS, qkv, cache, planner.plan(planned))
    expected = reference_attention.paged_attention(qkv, cache, planned, shape)
    assert_near(attended, expected)
    assert torch.equal(torch.nan_to_num(cache, nan=7.0), torch.nan_to_num(before, nan=7.0)), "attention wrote to the cache"


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128])
def test_decodes_of_awkward_lengths_match_the_reference(kv_heads: int, head_dim: int) -> None:
    lengths = [33, 17, 16, 15, 1]
    compare_attention([(1, length) for length in lengths], AttentionShape(BLOCK_SIZE, 4, kv_heads, head_dim))


@pytest.mark.parametrize("order", [[1, 15, 16, 17, 33], [33, 1, 17, 15, 16], [400, 1, 1, 390, 2]])
def test_the_order_of_decodes_does_not_matter(order: list[int]) -> None:
    compare_attention([(1, length) for length in order], AttentionShape(BLOCK_SIZE, 4, 2, 64))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128])
def test_a_batch_of_first_chunks_later_chunks_and_decodes_matches_the_reference(kv_heads: int, head_dim: int) -> None:
    rows = [(1, 33), (1, 1), (17, 17), (2, 16), (16, 33), (15, 15), (3, 20)]
    compare_attention(rows, AttentionShape(BLOCK_SIZE, 4, kv_heads, head_dim))


@pytest.mark.parametrize("window", [1, 7, 16, 21, 64])
def test_a_sliding_window_masks_earlier_tokens(window: int) -> None:
    rows = [(1, 50), (1, 22), (1, 3), (33, 33), (5, 40), (2, 17)]
    compare_attention(rows, AttentionShape(BLOCK_SIZE, 4, 2, 16, sliding_window=window))


@pytest.mark.parametrize("window", [None, 7, 16, 21])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_soft_capped_scores_with_a_custom_scale_match_the_reference(window: int | None, kv_heads: int) -> None:
    rows = [(1, 50), (1, 22), (1, 3), (33, 33), (5, 40), (2, 17)]
    shape = AttentionShape(BLOCK_SIZE, 4, kv_heads, 16, sliding_window=window, scale=0.4, softcap=1.5)
    compare_attention(rows, shape)


def test_a_custom_scale_without_soft_cap_matches_the_reference() -> None:
    compare_attention([(1, 20), (18, 18), (3, 20)], AttentionShape(BLOCK_SIZE, 4, 2, 16, scale=0.05))


def test_soft_capped_scores_in_slices_equal_those_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.torch.gathered_attention.SCORES_MAX", 4 * 40 * 3)
    compare_attention([(33, 33), (5, 40)], AttentionShape(BLOCK_SIZE, 4, 2, 16, softcap=1.5))


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_over_whole_texts_needs_no_cache(causal: bool, softcap: float | None) -> None:
    torch.manual_seed(1)
    lens = [1, 15, 16, 17, 33, 1]
    shape = AttentionShape(BLOCK_SIZE, 4, 2, 16, causal=causal, softcap=softcap)
    qkv = torch.randn(sum(lens), 8, 16)
    block_tables, num_blocks = tables(lens)
    cache = poisoned_cache(num_blocks, 2, 16)
    rows = [AttentionRow(table, length, length) for table, length in zip(block_tables, lens, strict=True)]
    slots = [row.block_table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for row in rows for p in range(row.context_len)]
    reference_attention.write_kv(qkv[:, 4:], cache, torch.tensor(slots))
    plan = ops.GatheredPlanner(shape, dtype=torch.float32, device=CPU).plan_whole(lens)
    assert_near(
        ops.paged_attention(plain_table.OPERATIONS, qkv, None, plan),
        reference_attention.paged_attention(qkv, cache, rows, shape),
    )


def test_a_chunk_reads_only_the_blocks_that_its_window_shows() -> None:
    shape = AttentionShape(BLOCK_SIZE, 4, 4, 16, sliding_window=20)
    planner = ops.GatheredPlanner(shape, dtype=torch.float32, device=CPU)
    (row,) = planner.plan([AttentionRow(list(range(100, 120)), 8, 300)]).prefills
    assert row.blocks is not None
    assert row.blocks.tolist() == [117, 118]  # the first of the queries, at 292, sees from 273 on
    assert row.num_keys == 300 - 17 * BLOCK_SIZE


def test_a_group_of_decodes_is_split_where_padding_costs_more_than_a_call() -> None:
    shape = AttentionShape(BLOCK_SIZE, 4, 4, 128)
    planner = ops.GatheredPlanner(shape, dtype=torch.float32, device=CPU)
    table = list(range(300))
    plan = planner.plan([AttentionRow(table, 1, length) for length in (4095, 4000, 40, 33, 1)])
    assert [(group.first, group.end) for group in plan.groups] == [(0, 2), (2, 5)]


@TABLES
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("size", [16, 96, 130])
def test_rms_norm_equals_its_definition(tokens: int, size: int, table: Operations) -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(tokens, size) * 30, torch.randn(size)
    expected = reference_norm.rms_norm(x, weight, 1e-6)
    assert_near(table.rms_norm(x, weight, 1e-6), expected)


@pytest.mark.parametrize("tokens", [1, 15, 17])
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128])
def test_rope_rotates_in_place_and_leaves_the_values_alone(tokens: int, head_dim: int) -> None:
    torch.manual_seed(3)
    angles = torch.rand(tokens, 1, head_dim // 2) * 6
    cos, signed_sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    qkv = torch.randn(tokens, 6, head_dim)
    expected = qkv.clone()
    for kernel, rows in ((reference_rope.rope_and_cache, expected), (rope_and_cache, qkv)):
        kernel(rows, cos, signed_sin, None, torch.zeros(tokens), num_kv_heads=2, rotary_dim=head_dim)
    assert_near(qkv, expected)


@TABLES
@pytest.mark.parametrize("tokens", [1, 15, 17])
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gated_activations_equal_their_definitions_and_leave_their_input_alone(
    name: str, tokens: int, table: Operations
) -> None:
    torch.manual_seed(4)
    gate_up = torch.randn(tokens, 66) * 5
    before = gate_up.clone()
    assert_near(getattr(table, name)(gate_up), getattr(reference_activation, name)(before))
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("tokens", [1, 15, 17])
@pytest.mark.parametrize("size", [16, 96, 130])
def test_layer_norm_equals_its_definition(tokens: int, size: int) -> None:
    torch.manual_seed(5)
    x, weight, bias = torch.randn(tokens, size) * 30 + 4, torch.randn(size), torch.randn(size)
    assert_near(ops.layer_norm(x, weight, bias, 1e-12), reference_norm.layer_norm(x, weight, bias, 1e-12))


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_the_gelus_equal_their_definitions_and_leave_their_input_alone(name: str) -> None:
    torch.manual_seed(6)
    x = torch.randn(17, 66) * 3
    before = x.clone()
    assert_near(getattr(ops, name)(x), getattr(reference_activation, name)(before))
    assert torch.equal(x, before)


@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("normalised", [True, False])
def test_a_mixture_of_experts_equals_one_token_and_one_expert_at_a_time(tokens: int, normalised: bool) -> None:
    torch.manual_seed(7)
    x, logits, matrices = torch.randn(tokens, 24), torch.randn(tokens, 9) * 3, torch.randn(9, 24, 24) / 5
    experts = [lambda rows, matrix=matrix: torch.tanh(rows @ matrix) for matrix in matrices]
    weights, expert_ids = plain_table.OPERATIONS.route(logits, 3, normalised=normalised)
    expected_weights, expected_ids = reference_experts.route(logits, 3, normalised=normalised)
    assert_near(weights, expected_weights)
    assert torch.equal(expert_ids, expected_ids)
    mixed = plain_table.OPERATIONS.mix_experts(x, weights, expert_ids, experts)
    assert_near(mixed, reference_experts.mix_experts(x, weights, expert_ids, experts))


def test_experts_that_no_token_chose_are_not_computed() -> None:
    def unused(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("this expert was not chosen")

    x = torch.randn(3, 4)
    ids = torch.tensor([[1], [1], [1]])
    assert torch.equal(
        plain_table.OPERATIONS.mix_experts(x, torch.ones(3, 1), ids, [unused, lambda rows: rows * 2, unused]), x * 2
    )
