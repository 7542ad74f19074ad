"""QK-norm, rotation and the write to the paged cache: the Triton kernel and torch's operations against float32 loops."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from kernels.reference import rope_and_cache as reference
from kernels.torch import rope_and_cache as cpu_rope
from kernels.triton.attention import rope_and_cache as triton_rope
from tests.support.interpreted_fp8 import correct_e4m3
from tests.support.kernel_cases import FLOATS, normal, padded_rows, poisoned
from tests.support.kernel_tolerances import Kind, assert_near, assert_same

BLOCK_SIZE = 16
NUM_BLOCKS = 5
EPS = 1e-6
BOTH = pytest.mark.parametrize("kernels", [triton_rope, cpu_rope], ids=["triton", "torch"])
# Torch rounds between the operations; on a CPU it serves float32.
BOTH_IN_THEIR_DTYPES = pytest.mark.parametrize(
    ("kernels", "dtype"),
    [*((triton_rope, dtype) for dtype in FLOATS), (cpu_rope, torch.float32)],
    ids=["triton-float32", "triton-float16", "torch-float32"],
)
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    correct_e4m3(monkeypatch)


class Case:
    """Inputs of a call, which `run` copies for the tested kernels and for the reference."""

    def __init__(
        self,
        tokens: int,
        heads: tuple[int, int, int],
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        rotary_dim: int | None = None,
        cache_dtype: torch.dtype | None = None,
        norm: torch.dtype | None = None,
        together: bool = False,
        scales: tuple[float, float] | None = None,
        slots: list[int] | None = None,
    ) -> None:
        num_heads, kv_heads, size = heads
        rotary_dim = rotary_dim or size
        wide = (num_heads + 2 * kv_heads) * size
        rows = padded_rows(normal(tokens, wide, dtype=dtype, device=device), wide + 16)
        self.qkv = rows.view(tokens, num_heads + 2 * kv_heads, size)
        angles = normal(tokens, 1, rotary_dim // 2, dtype=torch.float32, device=device, seed=1) * 3
        self.cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
        self.sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
        self.cache = poisoned(NUM_BLOCKS, BLOCK_SIZE, 2, kv_heads, size, dtype=cache_dtype or dtype, device=device)
        if slots is None:
            order = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=torch.Generator().manual_seed(7))
            slots = order[:tokens].tolist()
        self.slots = torch.tensor(slots, dtype=torch.int64, device=device)
        self.options: dict[str, Any] = {"num_kv_heads": kv_heads, "rotary_dim": rotary_dim, "eps": EPS}
        if norm is not None:
            sizes = (num_heads * size, kv_heads * size) if together else (size, size)
            weights = [normal(n, dtype=norm, device=device, seed=2 + i) for i, n in enumerate(sizes)]
            self.options |= {"q_weight": weights[0], "k_weight": weights[1]}
        if scales is not None:
            self.options["kv_scales"] = torch.tensor(scales, dtype=torch.float32, device=device)

    def run(self, kernels: ModuleType, *, cached: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        qkv, cache = self.qkv.clone(), self.cache.clone()
        kernels.rope_and_cache(qkv, self.cos, self.sin, cache if cached else None, self.slots, **self.options)
        return qkv, cache


def compare(kernels: ModuleType, case: Case, kind: Kind = "pointwise") -> None:
    """Compares outputs and cache with the reference. Elements that are not written remain NaN, in the same places."""
    qkv, cache = case.run(kernels)
    expected, expected_cache = case.run(reference)
    # cos · x - sin · y may cancel: the error is relative to its terms.
    assert_near(qkv, expected, kind, scale=2**6)
    untouched = expected_cache.float().isnan()
    assert_same(untouched, cache.float().isnan())
    cache_kind: Kind = "fp8" if cache.dtype == FP8 else kind
    assert_near(cache[~untouched], expected_cache[~untouched], cache_kind, scale=2**6)


@BOTH_IN_THEIR_DTYPES
@pytest.mark.parametrize("heads", [(4, 2, 64), (8, 1, 128), (3, 3, 96), (4, 4, 16), (6, 2, 256)])
@pytest.mark.parametrize("tokens", [1, 17])
def test_queries_and_keys_are_rotated_and_slots_are_filled(
    kernels: ModuleType, tokens: int, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    compare(kernels, Case(tokens, heads, dtype=dtype, device=device))


@BOTH
@pytest.mark.parametrize(("size", "rotary_dim"), [(64, 32), (128, 96), (80, 32), (96, 64)])
@pytest.mark.parametrize("norm", [None, torch.float32])
def test_partial_rotation_matches_the_reference(
    kernels: ModuleType, size: int, rotary_dim: int, norm: torch.dtype | None, device: torch.device
) -> None:
    compare(kernels, Case(5, (4, 2, size), rotary_dim=rotary_dim, norm=norm, device=device), "normed")


@BOTH
@pytest.mark.parametrize("heads", [(4, 2, 64), (2, 1, 128), (4, 4, 96)])
@pytest.mark.parametrize("together", [False, True])
def test_heads_are_normalised_separately_or_all_heads_of_a_token_together(
    kernels: ModuleType, together: bool, heads: tuple[int, int, int], device: torch.device
) -> None:
    compare(kernels, Case(5, heads, norm=torch.float32, together=together, device=device), "normed")


@pytest.mark.parametrize("norm", FLOATS)
def test_norms_in_half_precision_have_weights_of_either_dtype(norm: torch.dtype, device: torch.device) -> None:
    compare(triton_rope, Case(5, (4, 2, 64), dtype=torch.float16, norm=norm, device=device), "normed")


@BOTH
@pytest.mark.parametrize("tokens", [1, 5])
def test_tokens_without_a_slot_are_rotated_and_not_written(kernels: ModuleType, tokens: int, device: torch.device) -> None:
    slots = [-1, 40, -1, 3, -1][:tokens]
    compare(kernels, Case(tokens, (4, 2, 64), slots=slots, device=device))


@BOTH_IN_THEIR_DTYPES
@pytest.mark.parametrize("scales", [None, (0.5, 0.031), (2.0, 1.0)])
def test_an_fp8_cache_holds_values_divided_by_its_scales(
    kernels: ModuleType, scales: tuple[float, float] | None, dtype: torch.dtype, device: torch.device
) -> None:
    slots = [79, -1, 16, 0, 17]
    compare(kernels, Case(5, (4, 2, 64), dtype=dtype, cache_dtype=FP8, scales=scales, slots=slots, device=device), "normed")


@BOTH
def test_values_beyond_the_range_of_e4m3_saturate(kernels: ModuleType, device: torch.device) -> None:
    case = Case(1, (4, 2, 64), cache_dtype=FP8, scales=(1e-4, 1e-4), device=device)
    _, cache = case.run(kernels)
    held = cache.float()[case.slots // BLOCK_SIZE, case.slots % BLOCK_SIZE]
    assert bool((held.abs() <= 448).all())
    assert float(held.abs().max()) == 448


@BOTH
def test_nan_stays_nan_in_an_fp8_cache(kernels: ModuleType, device: torch.device) -> None:
    case = Case(1, (4, 2, 64), cache_dtype=FP8, device=device)
    case.qkv[0, 4, 5] = case.qkv[0, 6, 7] = float("nan")  # a key's and a value's
    _, cache = case.run(kernels)
    held = cache.float()[case.slots[0] // BLOCK_SIZE, case.slots[0] % BLOCK_SIZE]
    assert bool(held[0, 0, 5].isnan())
    assert bool(held[1, 0, 7].isnan())
    assert not bool(held[:, 1].isnan().any())


@BOTH
def test_without_a_cache_queries_and_keys_are_rotated_too(kernels: ModuleType, device: torch.device) -> None:
    case = Case(3, (4, 2, 64), device=device)
    qkv, cache = case.run(kernels, cached=False)
    assert_near(qkv, case.run(reference)[0], "pointwise", scale=2**6)
    assert bool(cache.isnan().all())


def test_slots_may_be_strided(device: torch.device) -> None:
    """As in a pool that holds several layers."""
    case = Case(17, (4, 2, 64), device=device)
    layers = poisoned(NUM_BLOCKS, BLOCK_SIZE, 3, 2, 2, 64, dtype=torch.float32, device=device)
    qkv, expected = case.run(reference)
    mine = case.qkv.clone()
    triton_rope.rope_and_cache(mine, case.cos, case.sin, layers[:, :, 1], case.slots, **case.options)
    assert_near(mine, qkv, "pointwise", scale=2**6)
    filled = ~expected.isnan()
    assert_near(layers[:, :, 1][filled], expected[filled], "pointwise", scale=2**6)
    assert int((~layers.isnan()).sum()) == int(filled.sum())


def test_bfloat16_is_read_and_written(device: torch.device) -> None:
    compare(triton_rope, Case(5, (4, 2, 64), dtype=torch.bfloat16, norm=torch.bfloat16, device=device), "normed")


def test_an_empty_batch_gives_an_empty_result(device: torch.device) -> None:
    case = Case(0, (4, 2, 64), device=device)
    assert case.run(triton_rope)[0].shape == (0, 8, 64)


@pytest.mark.parametrize("heads", [(32, 8, 128), (32, 8, 64), (16, 8, 128), (8, 1, 256), (9, 3, 64), (24, 8, 96)])
def test_head_tiles_occupy_every_thread_with_few_and_with_many_tokens(heads: tuple[int, int, int]) -> None:
    few, many = (triton_rope.head_tile(tokens, heads[0], heads[1], heads[2]) for tokens in (1, 4096))
    assert few.heads == many.heads
    assert heads[0] % few.heads == heads[1] % few.heads == 0
    half = 1 << (heads[2] // 2 - 1).bit_length()
    assert min(tile.tokens * tile.heads * half // (32 * tile.num_warps) for tile in (few, many)) >= 8


def test_wider_tiles_for_many_tokens_change_no_bit(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    case = Case(33, (4, 2, 64), norm=torch.float32, device=device)
    few = case.run(triton_rope)
    monkeypatch.setattr(triton_rope, "TOKENS_MANY", 1)
    many = case.run(triton_rope)
    assert_same(few[0], many[0])
    assert_same(few[1], many[1])
