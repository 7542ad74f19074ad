"""Fused GEMV with weights of 16 and 8 bits against float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch

from kernels import alternatives
from kernels.alternatives import PRODUCTS, alternative_in_force
from kernels.quantised_weights import pack_fp8, pack_int8
from kernels.reference import fused_linear as reference
from kernels.residual_stream import Gate, Stream
from kernels.triton.products import fused_linear, fused_row
from kernels.triton.products.fused_linear import FusedTiles
from kernels.triton.products.fused_row import GemvTiles, gemv_tiles
from tests.support.interpreted_fp8 import correct_e4m3
from tests.support.kernel_cases import normal
from tests.support.kernel_tolerances import assert_near

EPS = 1e-6
Pack = Callable[[torch.Tensor], Any]
PACKERS: dict[str, Pack] = {
    "plain": lambda weight: weight,
    "int8": pack_int8,
    "fp8": pack_fp8,
}
TILES = ((2, 16), (4, 64), (8, 512))
"""Outputs and columns of a step."""


def with_one_of(values: Sequence[Any]) -> list[tuple[str, tuple[int, int], Any]]:
    """Every kind of weight with every tile, so that each kind and each tile is combined with every value."""
    pairs = product(enumerate(PACKERS), enumerate(TILES))
    return [(kind, sizes, values[(one + other) % len(values)]) for (one, kind), (other, sizes) in pairs]


@pytest.fixture
def tiles(sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_row, "gemv_tiles", lambda *_, **__: GemvTiles(*sizes))
    correct_e4m3(monkeypatch)


def weight_of(kind: str, outputs: int, columns: int, device: torch.device) -> Any:
    exact = normal(outputs, columns, dtype=torch.float32, device=device, seed=1) / math.sqrt(columns)
    return PACKERS[kind](exact.half())


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(("kind", "sizes", "shape"), with_one_of([(24, 512), (19, 300)]))
def test_a_product_is_added_to_the_stream(kind: str, shape: tuple[int, int], device: torch.device) -> None:
    width, columns = shape
    float16 = partial(normal, dtype=torch.float16, device=device)
    operands = {
        "x": float16(1, columns),
        "weight": weight_of(kind, width, columns, device),
        "residual": float16(1, width, seed=2),
        "norm_weight": normal(width, dtype=torch.float32, device=device, seed=3),
    }
    plain: dict[str, Any] = {}
    for options in (plain, {"alpha": 0.25, "bias": float16(width, seed=4)}):
        actual, expected = fused_linear.linear_add(**operands, **options), reference.linear_add(**operands, **options)
        assert_near(actual.total, expected.total, "matmul", scale=2)
        assert_near(actual.weighted, expected.weighted, "matmul", scale=4)
        assert_near(actual.squares.sum(0), actual.total.float().square().sum(-1), "matmul")


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(("kind", "sizes", "gate"), with_one_of([None, "silu", "gelu_tanh"]))
def test_a_product_with_a_fused_norm_matches_the_reference(
    kind: str, gate: Gate | None, sizes: tuple[int, int], device: torch.device
) -> None:
    float16 = partial(normal, dtype=torch.float16, device=device)
    columns = min(640, 10 * sizes[1])  # ten steps, or two of which the second is short
    total, norm_weight = float16(1, columns) * 3, float16(columns, seed=1)
    stream = Stream(total, total * norm_weight, total.float().square().view(1, -1, 32).sum(-1).T.contiguous())
    outputs = 24 * (1 if gate is None else 2)
    weight = weight_of(kind, outputs, columns, device)
    for bias in (None, float16(outputs, seed=3)):
        actual = fused_linear.normed_linear(stream, weight, EPS, bias=bias, gate=gate)
        assert_near(actual, reference.normed_linear(stream, weight, EPS, bias=bias, gate=gate), "matmul", scale=64)


def test_neighbouring_rows_and_values_are_not_read(device: torch.device) -> None:
    """The row lies among NaN rows and before NaN values, neither of which may be read."""
    poisoned = torch.full((3, 272), float("nan"), dtype=torch.float16, device=device)
    poisoned[1, :256] = normal(256, dtype=torch.float16, device=device)
    x, weight = poisoned[1:2, :256], weight_of("plain", 16, 256, device)
    residual, norm_weight = (normal(*size, dtype=torch.float16, device=device, seed=5) for size in ((1, 16), (16,)))
    actual = fused_linear.linear_add(x, weight, residual, norm_weight)
    assert_near(actual.total, reference.linear_add(x.clone(), weight, residual, norm_weight).total, "matmul", scale=2)


def test_only_single_rows_of_16_bits_use_this_kernel(device: torch.device) -> None:
    weight = weight_of("plain", 16, 64, device)
    residual, norm_weight = (normal(*size, dtype=torch.float16, device=device) for size in ((2, 16), (16,)))
    with mock.patch.object(fused_row, "launch", wraps=fused_row.launch) as launched:
        for rows, columns in ((2, 64), (1, 64)):
            x = normal(rows, columns, dtype=torch.float16, device=device)
            fused_linear.linear_add(x, weight, residual[:rows], norm_weight)
            assert launched.call_count == (rows == 1)
        wide = fused_linear.linear_add(x.float(), weight.float(), residual[:1].float(), norm_weight.float())
        odd = fused_linear.linear_add(x[:, :63], weight[:, :63].contiguous(), residual[:1], norm_weight)
    assert launched.call_count == 1
    assert wide.total.shape == odd.total.shape == (1, 16)


def test_tiles_give_many_programs_and_steps_no_longer_than_rows() -> None:
    for outputs, columns, gated in ((6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (1024, 2048, False)):
        for weight_bytes in (1, 2):
            tiles = gemv_tiles(columns, gated=gated, has_squares_out=not gated, weight_bytes=weight_bytes)
            assert outputs // tiles.block_n >= 132
            assert tiles.block_k <= columns


@pytest.mark.parametrize("kind", PACKERS)
def test_the_tiles_for_more_rows_serve_one_row_where_they_are_in_force(
    kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct_e4m3(monkeypatch)
    x, weight = normal(1, 256, dtype=torch.float16, device=device), weight_of(kind, 48, 256, device)
    operands = x, weight, normal(1, 48, dtype=torch.float16, device=device), torch.ones(48, device=device)
    with alternative_in_force(PRODUCTS[16 if kind == "plain" else 8, 1], alternatives.TILES):
        tiles = fused_linear.choose_tiles(x, weight, 48, gated=False, has_squares_out=True)
        actual = fused_linear.linear_add(*operands)
    assert isinstance(tiles, FusedTiles)
    assert_near(actual.total, reference.linear_add(*operands).total, "matmul", scale=2)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_weights_that_are_not_contiguous_are_refused(num_rows: int, device: torch.device) -> None:
    x, residual = (normal(num_rows, columns, dtype=torch.float16, device=device) for columns in (64, 48))
    weight = normal(48, 128, dtype=torch.float16, device=device)[:, :64]
    with pytest.raises(AssertionError, match="the weight is contiguous"):
        fused_linear.linear_add(x, weight, residual, torch.ones(48, device=device))
