"""PTX of paged attention: decode steps, verification of drafts, prompt chunks, batch-invariant kernels."""

from __future__ import annotations

import pytest
import torch

from kernels.attention_rows import AttentionShape
from kernels.paged_plan import PagedPlan, paged_plan_attention
from kernels.reference import attention as reference
from kernels.triton import table as triton_table
from kernels.triton.attention import chunk_splits, lone_decode
from kernels.triton.attention import decode as attention_decode
from kernels.triton.attention import prefill as attention_prefill
from kernels.triton.attention import splits as attention_splits
from kernels.triton.invariant import attention as invariant_attention
from kernels.triton.invariant import table as invariant_table
from kernels.triton.products.split_k import arrival_counters
from tests.support.kernel_cases import (
    RotatedDecodeBatch,
)
from tests.support.kernel_tolerances import assert_near, assert_same
from tests.support.ptx.attention_batch import BF16, BLOCK, CPU, FP8, AttentionBatch, check_rotated_decode
from tests.support.ptx.block import LOCKSTEP, REVERSE
from tests.support.ptx.card import EmulatedCard


@pytest.mark.parametrize(
    ("shape", "is_invariant"),
    [(AttentionShape(BLOCK, 4, 1, 128), False), (AttentionShape(BLOCK, 4, 2, 64, sliding_window=30), True)],
)
def test_a_captured_step_with_decodes_chunks_and_padding_matches_the_reference(
    shape: AttentionShape, is_invariant: bool
) -> None:
    """Two decodes of at most four, two chunks and an empty one, and padding as another chunk."""
    counts, num_decodes, num_tokens = [1, 1, 21, 9], 4, 48
    batch = AttentionBatch(shape, [35, 18, 40, 130], counts)
    padding = num_tokens - sum(counts)
    tables = torch.zeros(num_decodes + 4, batch.tables.shape[1], dtype=torch.int32)
    tables[:2], tables[num_decodes : num_decodes + 2] = batch.tables[:2], batch.tables[2:]
    plan = PagedPlan(
        shape,
        num_decodes,
        tables,
        torch.tensor([35, 18, 0, 0, 40, 130, 0, padding], dtype=torch.int32),
        torch.tensor([2, 23, 32, 32, num_tokens], dtype=torch.int32),
        max_query_len=num_tokens,
        counts_all=True,
    )
    qkv = torch.zeros(num_tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, dtype=BF16)
    qkv[: sum(counts), : shape.num_heads] = batch.q
    table = invariant_table.OPERATIONS if is_invariant else triton_table.OPERATIONS
    found = paged_plan_attention(table, qkv, batch.cache, plan, None)
    assert_near(found[: sum(counts)], batch.expected(batch.scales), "attention")


@pytest.mark.parametrize(
    ("shape", "lengths", "kv_dtype", "is_normed"),
    [
        (AttentionShape(BLOCK, 4, 1, 128), [1, 15, 0, 257], BF16, False),
        (AttentionShape(BLOCK, 4, 1, 256, sliding_window=100, softcap=50.0), [140, 33], FP8, True),
    ],
)
def test_rotated_decode_steps_match_the_reference(
    shape: AttentionShape, lengths: list[int], kv_dtype: torch.dtype, is_normed: bool
) -> None:
    check_rotated_decode(RotatedDecodeBatch(lengths, shape, CPU, dtype=BF16, kv_dtype=kv_dtype, is_normed=is_normed))


@pytest.mark.parametrize(
    ("shape", "length", "kv_dtype", "is_normed", "order"),
    [
        (AttentionShape(BLOCK, 8, 2, 128), 0, BF16, False, LOCKSTEP),
        (AttentionShape(BLOCK, 8, 2, 128), 65, BF16, False, REVERSE),
        (AttentionShape(BLOCK, 8, 2, 128), 257, BF16, True, REVERSE),
        (AttentionShape(BLOCK, 3, 1, 96), 130, FP8, True, REVERSE),
        (AttentionShape(BLOCK, 4, 1, 256, sliding_window=100, softcap=50.0), 140, BF16, True, REVERSE),
    ],
)
def test_the_decode_of_a_single_request_matches_the_reference(
    shape: AttentionShape, length: int, kv_dtype: torch.dtype, is_normed: bool, order: str, card: EmulatedCard
) -> None:
    """In reverse order the first split is the last to finish, and merges all."""
    card.order = order
    check_rotated_decode(RotatedDecodeBatch([length], shape, CPU, dtype=BF16, kv_dtype=kv_dtype, is_normed=is_normed))
    assert not arrival_counters(CPU).any()


def test_splits_of_several_tiles_match_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lone_decode, "multiprocessors", lambda _: 2)
    check_rotated_decode(RotatedDecodeBatch([700], AttentionShape(BLOCK, 8, 2, 128), CPU, dtype=BF16))


@pytest.mark.parametrize(
    ("shape", "lengths", "kv_dtype"),
    [
        (AttentionShape(BLOCK, 4, 1, 128), [1, 15, 0, 257], BF16),
        (AttentionShape(64, 4, 1, 128), [17, 300], FP8),
        (AttentionShape(BLOCK, 4, 1, 256, sliding_window=100, softcap=50.0), [140, 33], BF16),
    ],
)
def test_decode_steps_match_the_reference(shape: AttentionShape, lengths: list[int], kv_dtype: torch.dtype) -> None:
    AttentionBatch(shape, lengths, [1] * len(lengths), kv_dtype).check_decode()


@pytest.mark.parametrize(
    ("shape", "lengths", "kv_dtype"),
    [
        (AttentionShape(BLOCK, 4, 1, 128), [300, 1, 0, 257, 17], BF16),
        (AttentionShape(BLOCK, 4, 1, 128), [600, 300, 16], FP8),
        (AttentionShape(BLOCK, 4, 1, 256, sliding_window=100, softcap=50.0), [140, 33, 90, 7], BF16),
    ],
)
def test_decode_steps_with_several_splits_per_program_match_the_reference(
    shape: AttentionShape, lengths: list[int], kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operands of a split are prefetched during the previous one, and nothing during the last."""
    monkeypatch.setattr(attention_decode, "multiprocessors", lambda _: 1)
    AttentionBatch(shape, lengths, [1] * len(lengths), kv_dtype).check_decode()


def test_drafts_with_several_splits_per_program_match_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_decode, "multiprocessors", lambda _: 1)
    AttentionBatch(AttentionShape(BLOCK, 4, 1, 128), [17, 2, 300, 40], [3, 2, 4, 1]).check_prefill()


def test_float16_matches_the_reference() -> None:
    AttentionBatch(AttentionShape(BLOCK, 2, 1, 64), [40, 17], [1, 1], torch.float16, torch.float16).check_decode()
    AttentionBatch(AttentionShape(BLOCK, 4, 1, 64), [60], [33], torch.float16, torch.float16).check_prefill()


def test_drafts_are_verified_by_the_decode_kernel() -> None:
    AttentionBatch(AttentionShape(BLOCK, 4, 1, 128), [17, 2, 150], [3, 2, 4]).check_prefill()


@pytest.mark.parametrize(
    ("shape", "kv_dtype", "dtype"),
    [
        (AttentionShape(BLOCK, 4, 1, 128), FP8, BF16),
        (AttentionShape(BLOCK, 8, 1, 64, sliding_window=90), torch.float16, torch.float16),
    ],
)
def test_drafts_of_one_request_in_groups_match_the_reference(
    shape: AttentionShape, kv_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """1 + 10 rows of one request, one of another, padding, and groups without rows."""
    batch = AttentionBatch(shape, [310, 17, 0], [11, 1, 3], kv_dtype, dtype)
    group_size = attention_splits.max_verify_group(shape, kv_dtype, CPU)
    ends = [*range(group_size, 11, group_size), 11]
    tables = batch.tables[[0] * len(ends) + [1, 2, 0, 0]]
    lens = torch.tensor([310 - 11 + end for end in ends] + [17, 0, 0, 0], dtype=torch.int32)
    starts = torch.tensor([0, *ends, 12, 15, 15, 15], dtype=torch.int32)
    workspace = attention_splits.decode_workspace(shape, 15, tables.shape[1], kv_dtype, CPU)
    for tensor in workspace:
        tensor.fill_(float("nan"))
    out = batch.out()
    attention_prefill.paged_prefill(
        batch.q, batch.cache, tables, starts, lens, shape,
        max_query_len=group_size, kv_scales=batch.scales, out=out.tensor, workspace=workspace,
    )  # fmt: skip
    own_tables = batch.tables[[0] * 11 + [1, 2, 2, 2]]
    own_lens = torch.tensor([*range(300, 311), 17, 0, 0, 0], dtype=torch.int32)
    alone = (batch.q, batch.cache, own_tables, own_lens, shape)
    assert_near(out.check(), reference.paged_decode(*alone, kv_scales=batch.scales), "attention")


@pytest.mark.parametrize(
    ("shape", "lengths", "counts", "kv_dtype"),
    [
        (AttentionShape(BLOCK, 4, 1, 128), [200, 40], [9, 12], FP8),
        (AttentionShape(BLOCK, 2, 1, 256, sliding_window=140, softcap=50.0), [200], [40], BF16),
    ],
)
def test_split_keys_of_short_chunks_match_the_reference(
    shape: AttentionShape,
    lengths: list[int],
    counts: list[int],
    kv_dtype: torch.dtype,
    card: EmulatedCard,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunk_splits, "SPLIT_KEYS", 64)
    monkeypatch.setattr(chunk_splits, "SPLIT_FROM", 2)
    launched = card.launched.get("merge_chunks_kernel", 0)
    AttentionBatch(shape, lengths, counts, kv_dtype).check_prefill()
    assert card.launched["merge_chunks_kernel"] > launched


@pytest.mark.parametrize(
    ("shape", "lengths", "counts", "kv_dtype"),
    [
        (AttentionShape(BLOCK, 2, 1, 128), [40, 17], [12, 9], BF16),
        (AttentionShape(BLOCK, 4, 1, 128), [150, 40], [40, 12], BF16),
        (AttentionShape(BLOCK, 4, 1, 128), [100], [40], FP8),
        (AttentionShape(BLOCK, 2, 1, 256, sliding_window=60, softcap=50.0), [110], [40], BF16),
    ],
)
def test_prompt_chunks_match_the_reference(
    shape: AttentionShape, lengths: list[int], counts: list[int], kv_dtype: torch.dtype
) -> None:
    AttentionBatch(shape, lengths, counts, kv_dtype).check_prefill()


def test_a_query_has_the_same_bits_in_any_chunk_and_in_a_decode_step() -> None:
    batch = AttentionBatch(AttentionShape(BLOCK, 4, 1, 128), [330, 40], [20, 12], FP8)
    given = (batch.cache, batch.tables)
    whole = invariant_attention.paged_prefill(
        batch.q, *given, batch.query_starts, batch.context_lens, batch.shape, max_query_len=20, kv_scales=batch.scales
    )
    assert_near(whole, batch.expected(batch.scales), "attention")
    last = batch.query_starts[1:].long() - 1
    decoded = invariant_attention.paged_decode(
        batch.q[last].contiguous(), *given, batch.context_lens, batch.shape, kv_scales=batch.scales
    )
    assert_same(decoded, whole[last])
    starts, lens = torch.tensor([0, 9], dtype=torch.int32), torch.tensor([330 - 11], dtype=torch.int32)
    chunk = invariant_attention.paged_prefill(
        batch.q[:9], batch.cache, batch.tables[:1], starts, lens, batch.shape, max_query_len=9, kv_scales=batch.scales
    )
    assert_same(chunk, whole[:9])
