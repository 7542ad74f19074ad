"""The decode of a single request in one launch, against separate rotation, cache write and attention."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.attention_rows import AttentionShape
from kernels.triton.attention import lone_decode as lone
from kernels.triton.attention.rotated_decode import rotated_decode
from kernels.triton.products.split_k import arrival_counters
from tests.support.interpreted_fp8 import correct_e4m3
from tests.support.kernel_cases import RotatedDecodeBatch
from tests.support.kernel_tolerances import assert_same

SHAPE = AttentionShape(16, 4, 2, 64)
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    correct_e4m3(monkeypatch)


def compare(batch: RotatedDecodeBatch) -> torch.Tensor:
    found = batch.compare(rotated_decode)
    assert not arrival_counters(found.device).any(), "the last program resets the counters"
    return found


@pytest.mark.parametrize("length", [0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 127, 193, 449, 1000])
def test_awkward_lengths_match_the_separate_operations(length: int, device: torch.device) -> None:
    """The card holds six splits at a time: beyond 192 tokens they have several tiles."""
    compare(RotatedDecodeBatch([length], SHAPE, device))


@pytest.mark.parametrize("length", [1, 32, 33, 600])
def test_a_large_card_with_a_tile_for_each_program_matches_the_reference(
    length: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lone, "multiprocessors", lambda _: 132)
    compare(RotatedDecodeBatch([length], SHAPE, device))


@pytest.mark.parametrize("multiprocessors", [1, 2, 5, 132])
def test_results_on_all_gpus_differ_only_by_rounding(
    multiprocessors: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lone, "multiprocessors", lambda _: multiprocessors)
    compare(RotatedDecodeBatch([411], AttentionShape(16, 8, 4, 32), device, is_normed=True))


@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 256])
@pytest.mark.parametrize("is_normed", [False, True])
def test_every_head_size_matches_the_reference(head_dim: int, is_normed: bool, device: torch.device) -> None:
    compare(RotatedDecodeBatch([67], AttentionShape(16, 4, 2, head_dim), device, is_normed=is_normed))


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1), (6, 2), (20, 1)])
def test_every_number_of_query_heads_per_kv_head_matches_the_reference(heads: tuple[int, int], device: torch.device) -> None:
    compare(RotatedDecodeBatch([67], AttentionShape(16, *heads, 16), device))


@pytest.mark.parametrize(("block_size", "length"), [(32, 65), (64, 130), (128, 200), (8, 50)])
def test_every_block_size_matches_the_reference(block_size: int, length: int, device: torch.device) -> None:
    compare(RotatedDecodeBatch([length], AttentionShape(block_size, 4, 2, 32), device))


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 32), (64, 16), (96, 64), (128, 96)])
def test_partial_rotation_matches_the_reference(head_dim: int, rotary_dim: int, device: torch.device) -> None:
    compare(RotatedDecodeBatch([65], AttentionShape(32, 4, 2, head_dim), device, rotary_dim=rotary_dim, is_normed=True))


@pytest.mark.parametrize("window", [1, 16, 21, 64, 300])
@pytest.mark.parametrize("length", [1, 50, 90, 333])
def test_a_window_with_capped_scores_matches_the_reference(window: int, length: int, device: torch.device) -> None:
    shape = AttentionShape(16, 2, 1, 32, sliding_window=window, softcap=5.0)
    compare(RotatedDecodeBatch([length], shape, device, is_normed=True))


def test_tokens_before_the_window_are_not_read(device: torch.device) -> None:
    """Blocks that are entirely before the window may belong to another request by now."""
    shape = AttentionShape(16, 2, 1, 32, sliding_window=40)
    batch = RotatedDecodeBatch([150], shape, device)
    found = compare(batch)
    for token in range(150 - 40):
        batch.cache[batch.tables[0, token // 16], token % 16] = torch.nan
    assert_same(rotated_decode(*batch.arguments(batch.cache), **batch.options), found)


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("length", [0, 2, 65, 300])
def test_an_8_bit_cache_matches_the_reference(head_dim: int, length: int, device: torch.device) -> None:
    compare(RotatedDecodeBatch([length], AttentionShape(16, 4, 2, head_dim), device, kv_dtype=FP8, is_normed=True))


def test_half_precision_matches_the_reference(device: torch.device) -> None:
    compare(RotatedDecodeBatch([300], SHAPE, device, dtype=torch.float16))


def test_a_key_beyond_448_saturates_at_448(device: torch.device) -> None:
    batch = RotatedDecodeBatch([33], SHAPE, device, kv_dtype=FP8)
    batch.qkv *= 4000.0
    rotated_decode(*batch.arguments(batch.cache), **batch.options)
    written = batch.cache[batch.slots[0] // 16, batch.slots[0] % 16].float()
    assert written.abs().max() == 448


def test_a_row_without_a_slot_is_computed_but_not_stored(device: torch.device) -> None:
    batch = RotatedDecodeBatch([40], SHAPE, device)
    cache = batch.cache.clone()
    stored = rotated_decode(*batch.arguments(cache), **batch.options)
    batch.slots[0] = -1
    before = batch.cache.clone()
    assert_same(rotated_decode(*batch.arguments(batch.cache), **batch.options), stored)
    assert_same(batch.cache, before)


def test_a_longer_table_changes_no_bit(device: torch.device) -> None:
    """The block tables of a step are as wide as the longest possible request."""
    batch = RotatedDecodeBatch([130], SHAPE, device)
    found = rotated_decode(*batch.arguments(batch.cache.clone()), **batch.options)
    batch.tables = torch.nn.functional.pad(batch.tables, (0, 7), value=2**30)
    assert_same(rotated_decode(*batch.arguments(batch.cache), **batch.options), found)


def test_the_whole_operation_is_one_launch(device: torch.device, launches: Callable[[], int]) -> None:
    batch = RotatedDecodeBatch([333], SHAPE, device)
    rotated_decode(*batch.arguments(batch.cache), **batch.options)
    assert launches() == 1
