"""Rotation, cache write and decode attention in one launch, against separate operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.alternatives import FEW_ROWS_ATTENTION, LONE_ATTENTION, Choice, alternative_in_force
from kernels.attention_rows import AttentionShape
from kernels.triton.attention import rotated_decode as kernel
from kernels.triton.attention import splits
from kernels.triton.attention.decode import paged_decode
from kernels.triton.attention.rope_and_cache import rope_and_cache
from tests.support.interpreted_fp8 import correct_e4m3
from tests.support.kernel_cases import RotatedDecodeBatch
from tests.support.kernel_tolerances import assert_same

SHAPE = AttentionShape(16, 4, 2, 64)
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short requests have many splits, and programs process several of them."""
    tiling = splits.DecodeTiling(tile=32, split=32, num_warps=4, num_stages=2, programs=2)
    monkeypatch.setattr(splits, "decode_tiling", lambda *_: tiling)
    correct_e4m3(monkeypatch)


def compare(batch: RotatedDecodeBatch) -> None:
    batch.compare(kernel.rotated_decode)


@pytest.mark.parametrize("lengths", [[1, 15, 16, 17], [33, 31, 0, 1], [257, 129, 67, 128], [2, 0], [32, 64, 96, 33, 65]])
def test_awkward_lengths_match_the_separate_operations(lengths: list[int], device: torch.device) -> None:
    compare(RotatedDecodeBatch(lengths, SHAPE, device))


@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 256])
@pytest.mark.parametrize("is_normed", [False, True])
def test_every_head_size_matches_the_reference(head_dim: int, is_normed: bool, device: torch.device) -> None:
    compare(RotatedDecodeBatch([67, 5], AttentionShape(16, 4, 2, head_dim), device, is_normed=is_normed))


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1), (6, 2), (20, 1)])
def test_every_number_of_query_heads_per_kv_head_matches_the_reference(heads: tuple[int, int], device: torch.device) -> None:
    compare(RotatedDecodeBatch([37, 5], AttentionShape(16, *heads, 16), device))


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 32), (64, 16), (96, 64), (128, 96)])
def test_partial_rotation_matches_the_reference(head_dim: int, rotary_dim: int, device: torch.device) -> None:
    shape = AttentionShape(32, 4, 2, head_dim)
    compare(RotatedDecodeBatch([65, 40, 2], shape, device, rotary_dim=rotary_dim, is_normed=True))


@pytest.mark.parametrize("window", [1, 16, 21, 64])
def test_a_window_with_capped_scores_matches_the_reference(window: int, device: torch.device) -> None:
    shape = AttentionShape(16, 2, 1, 32, sliding_window=window, softcap=5.0)
    compare(RotatedDecodeBatch([1, 50, 22, 90], shape, device, is_normed=True))


@pytest.mark.parametrize("head_dim", [64, 256])
def test_an_8_bit_cache_matches_the_reference(head_dim: int, device: torch.device) -> None:
    shape = AttentionShape(16, 4, 2, head_dim)
    compare(RotatedDecodeBatch([65, 140, 2, 0], shape, device, kv_dtype=FP8, is_normed=True))


def test_a_key_beyond_448_saturates_at_448(device: torch.device) -> None:
    batch = RotatedDecodeBatch([33, 5], SHAPE, device, kv_dtype=FP8)
    batch.qkv *= 4000.0
    kernel.rotated_decode(*batch.arguments(batch.cache), **batch.options)
    written = batch.cache[batch.slots[0] // 16, batch.slots[0] % 16].float()
    assert written.abs().max() == 448


def test_a_row_without_a_slot_is_computed_but_not_stored(device: torch.device) -> None:
    batch = RotatedDecodeBatch([40, 3], SHAPE, device)
    batch.slots[0] = -1
    before = batch.cache.clone()
    found = kernel.rotated_decode(*batch.arguments(batch.cache), **batch.options)
    changed = batch.cache.nan_to_num(7.0) != before.nan_to_num(7.0)
    assert changed.any(-1).any(-1).any(-1).sum() == 1
    assert found.isfinite().all()


def test_a_row_has_the_same_bits_among_others(device: torch.device) -> None:
    """A single row has a kernel of its own (`lone_decode`)."""
    lengths = [257, 3, 64, 0, 129]
    batch = RotatedDecodeBatch(lengths, SHAPE, device, is_normed=True)
    together = rotated_rows(batch, slice(None))
    for row in range(len(lengths) - 1):
        assert_same(rotated_rows(batch, slice(row, row + 2)), together[row : row + 2])


def rotated_rows(batch: RotatedDecodeBatch, rows: slice) -> torch.Tensor:
    return kernel.rotated_decode(*batch.arguments(batch.cache.clone(), rows), **batch.options)


def test_the_whole_operation_takes_one_launch_fewer(device: torch.device, launches: Callable[[], int]) -> None:
    batch = RotatedDecodeBatch([33, 7], SHAPE, device)
    kernel.rotated_decode(*batch.arguments(batch.cache), **batch.options)
    assert launches() == 2
    qkv, cos, sin, cache, slots, tables, lens, shape = batch.arguments(batch.cache)
    rope_and_cache(qkv, cos, sin, cache, slots, num_kv_heads=shape.num_kv_heads, **batch.options)
    paged_decode(qkv[:, : shape.num_heads], cache, tables, lens, shape)
    assert launches() == 3


@pytest.mark.parametrize(
    ("choice", "alternative"),
    [(choice, each) for choice in (LONE_ATTENTION, FEW_ROWS_ATTENTION) for each in choice.alternatives],
)
@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_every_alternative_matches_the_reference(
    choice: Choice, alternative: str, kv_dtype: torch.dtype | None, device: torch.device
) -> None:
    lengths = [70] if choice is LONE_ATTENTION else [70, 1, 33]
    batch = RotatedDecodeBatch(lengths, SHAPE, device, kv_dtype=kv_dtype, is_normed=True)

    def decode(qkv: torch.Tensor, *operands: Any, **options: Any) -> torch.Tensor:
        return kernel.rotated_decode(qkv.clone(), *operands, **options)  # which may be changed

    with alternative_in_force(choice, alternative):
        batch.compare(decode)


@pytest.mark.parametrize(
    ("choice", "num_rows", "expected"),
    [(LONE_ATTENTION, 1, [1, 2, 3]), (FEW_ROWS_ATTENTION, 2, [2, 3])],
)
def test_alternatives_differ_in_their_launches(
    choice: Choice, num_rows: int, expected: list[int], device: torch.device, launches: Callable[[], int]
) -> None:
    batch = RotatedDecodeBatch([33] * num_rows, SHAPE, device)
    found = []
    for alternative in choice.alternatives:
        with alternative_in_force(choice, alternative):
            kernel.rotated_decode(*batch.arguments(batch.cache), **batch.options)
        found.append(launches())
    assert found == expected
