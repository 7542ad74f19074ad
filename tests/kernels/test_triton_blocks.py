"""Copying, gathering and scattering of blocks: Triton kernels and torch operations against loops, bit by bit."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from kernels.reference import blocks as reference
from kernels.torch import blocks as cpu_blocks
from kernels.triton.step import blocks as triton_blocks
from tests.support.kernel_cases import Guarded, normal, poisoned
from tests.support.kernel_tolerances import assert_same

BOTH = pytest.mark.parametrize("kernels", [triton_blocks, cpu_blocks], ids=["triton", "torch"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
BLOCK_SHAPE = (16, 2, 1, 24)
NUM_BLOCKS, LAYERS = 9, 3


def caches(dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    return [normal(NUM_BLOCKS, *BLOCK_SHAPE, dtype=torch.float32, device=device, seed=i).to(dtype) for i in range(LAYERS)]


def ids(*numbers: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


@BOTH
@DTYPES
def test_blocks_of_all_layers_are_copied(kernels: ModuleType, dtype: torch.dtype, device: torch.device) -> None:
    made, expected = caches(dtype, device), caches(dtype, device)
    sources, targets = ids(8, 0, 8, device=device), ids(3, 2, 7, device=device)
    kernels.copy_blocks(made, sources, targets)
    reference.copy_blocks(expected, sources, targets)
    for one, other in zip(made, expected, strict=True):
        assert_same(one, other)


@BOTH
@DTYPES
def test_staged_blocks_are_scattered_to_other_blocks(kernels: ModuleType, dtype: torch.dtype, device: torch.device) -> None:
    made, before = caches(dtype, device), caches(dtype, device)
    staging = Guarded((4, LAYERS, *BLOCK_SHAPE), dtype, device)
    expected = poisoned(4, LAYERS, *BLOCK_SHAPE, dtype=dtype, device=device)
    rows = ids(3, 0, device=device)
    kernels.gather_blocks(made, ids(8, 1, device=device), staging.tensor, rows)
    reference.gather_blocks(before, ids(8, 1, device=device), expected, rows)
    assert_same(staging.check(), expected)
    kernels.scatter_blocks(made, ids(0, 5, device=device), staging.tensor, rows)
    reference.scatter_blocks(before, ids(0, 5, device=device), expected, rows)
    for one, other in zip(made, before, strict=True):
        assert_same(one, other)
        assert_same(one[0], one[8])


def test_a_block_longer_than_one_program_is_moved_completely(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(triton_blocks, "BLOCK", 64)
    made, expected = caches(torch.float32, device), caches(torch.float32, device)
    assert expected[0][0].nbytes > 5 * 64 * 8
    triton_blocks.copy_blocks(made, ids(4, device=device), ids(0, device=device))
    reference.copy_blocks(expected, ids(4, device=device), ids(0, device=device))
    for one, other in zip(made, expected, strict=True):
        assert_same(one, other)


def test_blocks_may_be_strided(device: torch.device) -> None:
    """As in a pool that holds several layers."""
    pool = normal(NUM_BLOCKS, LAYERS, *BLOCK_SHAPE, dtype=torch.float32, device=device)
    expected = pool.clone()
    triton_blocks.copy_blocks([pool[:, layer] for layer in range(LAYERS)], ids(4, device=device), ids(0, device=device))
    expected[0] = expected[4]
    assert_same(pool, expected)


@BOTH
def test_moving_no_blocks_changes_nothing(kernels: ModuleType, device: torch.device) -> None:
    made = caches(torch.float32, device)
    before = [cache.clone() for cache in made]
    nothing = ids(device=device)
    kernels.copy_blocks(made, nothing, nothing)
    kernels.gather_blocks(made, nothing, torch.empty(0, LAYERS, *BLOCK_SHAPE, device=device), nothing)
    kernels.scatter_blocks(made, nothing, torch.empty(0, LAYERS, *BLOCK_SHAPE, device=device), nothing)
    assert all(torch.equal(*pair) for pair in zip(made, before, strict=True))


def test_blocks_not_aligned_to_words_are_refused(device: torch.device) -> None:
    one = ids(0, device=device)
    with pytest.raises(AssertionError, match="not a multiple of 16"):
        triton_blocks.copy_blocks([torch.zeros(4, 3, device=device)], one, one)
    with pytest.raises(AssertionError, match="same layout"):
        triton_blocks.copy_blocks([torch.zeros(4, 4, device=device), torch.zeros(4, 8, device=device)], one, one)
