"""PTX of the Gluon prefill kernel for Hopper, which no interpreter runs: odd lengths, head groups, blocks and splits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.attention_rows import AttentionShape
from kernels.triton.attention import chunk_splits
from kernels.triton.attention import prefill_hopper as attention_prefill_hopper
from kernels.triton.attention.prefill import paged_prefill
from kernels.triton.attention.prefill_hopper import KEYS, ROWS, VARIABLE, is_overlapped
from tests.support.far_memory import far_blocks
from tests.support.kernel_tolerances import assert_near, assert_same
from tests.support.ptx.attention_batch import AttentionBatch
from tests.support.ptx.card import EmulatedCard

SHAPE = AttentionShape(16, 4, 1, 128)
KERNEL, MERGE = "overlapped_kernel", "merge_chunks_kernel"


def test_the_kernel_is_used_for_common_shapes() -> None:
    assert is_overlapped(SHAPE, 2, ROWS, 90)
    assert is_overlapped(replace(SHAPE, head_dim=64, block_size=KEYS), 2, ROWS, 90)


def test_an_environment_variable_disables_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    monkeypatch.setattr(attention_prefill_hopper, "_is_enabled", attention_prefill_hopper._is_enabled.__wrapped__)
    assert not is_overlapped(SHAPE, 2, ROWS, 90)


@pytest.mark.parametrize(
    ("shape", "kv_bytes", "rows", "capability"),
    [
        (replace(SHAPE, sliding_window=100), 2, ROWS, 90),
        (replace(SHAPE, softcap=30.0), 2, ROWS, 90),
        (replace(SHAPE, head_dim=96), 2, ROWS, 90),
        (replace(SHAPE, head_dim=256), 2, ROWS, 90),
        (replace(SHAPE, block_size=2 * KEYS), 2, ROWS, 90),
        (SHAPE, 1, ROWS, 90),
        (SHAPE, 4, ROWS, 90),
        (SHAPE, 2, 64, 90),
        (SHAPE, 2, ROWS, 89),
        (SHAPE, 2, ROWS, 100),
    ],
)
def test_other_shapes_types_and_gpus_use_another_kernel(
    shape: AttentionShape, kv_bytes: int, rows: int, capability: int
) -> None:
    assert not is_overlapped(shape, kv_bytes, rows, capability)


@pytest.mark.parametrize(
    ("shape", "lengths", "counts"),
    [
        (SHAPE, [128, 127], [40, 33]),
        (SHAPE, [129, 40, 1], [33, 12, 1]),
        (SHAPE, [390], [17]),
        (replace(SHAPE, head_dim=64, block_size=64), [300, 256], [33, 20]),
        (replace(SHAPE, num_heads=7, block_size=KEYS), [257, 3], [40, 2]),
    ],
)
def test_prompt_chunks_match_the_reference(
    card: EmulatedCard, shape: AttentionShape, lengths: list[int], counts: list[int]
) -> None:
    before = card.launched.get(KERNEL, 0)
    AttentionBatch(shape, lengths, counts).check_prefill()
    assert card.launched[KERNEL] > before


def test_blocks_at_far_addresses_are_read(card: EmulatedCard) -> None:
    batch, launched = AttentionBatch(SHAPE, [129, 40], [33, 12]), card.launched.get(KERNEL, 0)
    cache, first = far_blocks(batch.cache)
    out = batch.out()
    places = (cache, batch.tables + first, batch.query_starts, batch.context_lens)
    paged_prefill(batch.q, *places, SHAPE, max_query_len=batch.max_query_len, out=out.tensor)
    assert_near(out.check(), batch.expected(batch.scales), "attention")
    assert card.launched[KERNEL] > launched


@pytest.mark.parametrize("unused_rows", [40, 64])
def test_unused_rows_before_the_first_chunk_are_not_written(card: EmulatedCard, unused_rows: int) -> None:
    launched = card.launched.get(KERNEL, 0)
    AttentionBatch(SHAPE, [129, 40], [33, 12], unused_rows=unused_rows).check_prefill()
    assert card.launched[KERNEL] > launched


def test_a_request_has_the_same_bits_alone_and_in_a_batch() -> None:
    batch = AttentionBatch(SHAPE, [40, 300, 17], [30, 37, 17])
    given = (batch.cache, batch.tables)
    together = paged_prefill(batch.q, *given, batch.query_starts, batch.context_lens, SHAPE, max_query_len=37)
    starts = torch.tensor([0, 37], dtype=torch.int32)
    alone = paged_prefill(
        batch.q[30:67], batch.cache, batch.tables[1:2], starts, batch.context_lens[1:2], SHAPE, max_query_len=37
    )
    assert_same(alone, together[30:67])


@pytest.mark.parametrize(
    ("shape", "lengths", "counts", "unused_rows"),
    [
        (SHAPE, [512, 511, 60], [17, 1, 20], 0),
        (replace(SHAPE, num_heads=7, block_size=KEYS), [640, 3], [70, 2], 35),
    ],
)
def test_split_keys_of_short_chunks_match_the_reference(
    card: EmulatedCard,
    shape: AttentionShape,
    lengths: list[int],
    counts: list[int],
    unused_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Splits of one tile and of two; some queries have no visible keys in the last split."""
    monkeypatch.setattr(chunk_splits, "SPLIT_KEYS", KEYS)
    launched = {name: card.launched.get(name, 0) for name in (KERNEL, MERGE)}
    AttentionBatch(shape, lengths, counts, unused_rows=unused_rows).check_prefill()
    assert all(card.launched[name] > number for name, number in launched.items())


def test_a_split_request_has_the_same_bits_alone_and_beside_a_longer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_splits, "SPLIT_KEYS", KEYS)
    batch = AttentionBatch(SHAPE, [530, 700], [20, 12])
    beside = paged_prefill(batch.q, batch.cache, batch.tables, batch.query_starts, batch.context_lens, SHAPE, max_query_len=20)
    lens = torch.tensor([530, 12], dtype=torch.int32)
    short = paged_prefill(
        batch.q, batch.cache, batch.tables[:, :34].contiguous(), batch.query_starts, lens, SHAPE, max_query_len=20
    )
    assert_same(short[:20], beside[:20])
