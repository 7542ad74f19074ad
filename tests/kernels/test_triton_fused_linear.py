"""Fused products (residual sum, norm, gated activation): the Triton kernels against float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from kernels.quantised_weights import Fp8Weight, Int8Weight, pack_fp8, pack_int4, pack_int8
from kernels.reference import fused_linear as reference
from kernels.reference.norm import rms_norm
from kernels.residual_stream import Gate, Stream
from kernels.triton.products import fused_linear
from kernels.triton.products.fused_linear import FusedTiles
from tests.support.kernel_cases import FLOATS, normal
from tests.support.kernel_tolerances import assert_near, assert_same

pytestmark = pytest.mark.usefixtures("poisoned_partial_sums")
EPS = 1e-6
GATES: tuple[Gate | None, ...] = (None, "silu", "gelu_tanh")
SPLITS = pytest.mark.parametrize("splits", [1, 4])


def set_splits(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    tiles = FusedTiles(16, 16, 32, num_warps=4, num_stages=3, splits=splits)
    monkeypatch.setattr(fused_linear, "fused_tiles", lambda *_, **__: tiles)


def inputs(rows: int, width: int, columns: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    return {
        "x": normal(rows, columns, dtype=dtype, device=device),
        "weight": (normal(width, columns, dtype=torch.float32, device=device, seed=1) / math.sqrt(columns)).to(dtype),
        "residual": normal(rows, width, dtype=dtype, device=device, seed=2),
        "norm_weight": normal(width, dtype=torch.float32, device=device, seed=3),
    }


@SPLITS
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "width", "columns"), [(1, 32, 128), (16, 48, 64), (3, 24, 91)])
def test_a_product_is_added_to_the_stream(
    rows: int, width: int, columns: int, dtype: torch.dtype, splits: int,
    monkeypatch: pytest.MonkeyPatch, device: torch.device,
) -> None:  # fmt: skip
    set_splits(monkeypatch, splits)
    operands = inputs(rows, width, columns, dtype, device)
    plain: dict[str, Any] = {}
    for options in (plain, {"alpha": 0.25, "bias": normal(width, dtype=dtype, device=device, seed=4)}):
        actual = fused_linear.linear_add(**operands, **options)
        expected = reference.linear_add(**operands, **options)
        assert_near(actual.total, expected.total, "matmul")
        assert_near(actual.weighted, expected.weighted, "matmul", scale=4)
        assert_near(actual.squares.sum(0), actual.total.float().square().sum(-1), "matmul")


@SPLITS
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "width", "columns"), [(1, 32, 128), (5, 24, 91)])
def test_a_product_with_a_fused_norm_matches_the_reference(
    rows: int, width: int, columns: int, dtype: torch.dtype, gate: Gate | None, splits: int,
    monkeypatch: pytest.MonkeyPatch, device: torch.device,
) -> None:  # fmt: skip
    set_splits(monkeypatch, splits)
    total = normal(rows, columns, dtype=dtype, device=device) * 3
    norm_weight = normal(columns, dtype=dtype, device=device, seed=1)
    squares = total.float().square().view(rows, -1, columns // (7 if columns == 91 else 8)).sum(-1).T.contiguous()
    stream = Stream(total, (total.float() * norm_weight.float()).to(dtype), squares)
    outputs = width * (1 if gate is None else 2)
    weight = (normal(outputs, columns, dtype=torch.float32, device=device, seed=2) / math.sqrt(columns)).to(dtype)
    for bias in (None, normal(outputs, dtype=dtype, device=device, seed=3)):
        actual = fused_linear.normed_linear(stream, weight, EPS, bias=bias, gate=gate)
        assert_near(actual, reference.normed_linear(stream, weight, EPS, bias=bias, gate=gate), "matmul", scale=8)
        if gate is None and bias is None:
            normed = rms_norm(total.float(), norm_weight, EPS)
            assert_near(actual, (normed @ weight.float().T).to(dtype), "matmul", scale=8)


@SPLITS
@pytest.mark.parametrize("pack", [pack_int8, pack_fp8])
def test_weights_of_8_bits_are_scaled_after_the_sum(
    pack: Callable[[torch.Tensor], Int8Weight | Fp8Weight], splits: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    set_splits(monkeypatch, splits)
    operands = inputs(3, 40, 128, torch.float16, device)
    operands["weight"] = pack(operands["weight"])
    actual, expected = fused_linear.linear_add(**operands), reference.linear_add(**operands)
    assert_near(actual.total, expected.total, "matmul", scale=2)
    weight = pack(normal(48, 40, dtype=torch.float16, device=device, seed=9))
    for gate in GATES:
        product = fused_linear.normed_linear(expected, weight, EPS, gate=gate)
        assert_near(product, reference.normed_linear(expected, weight, EPS, gate=gate), "matmul", scale=64)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("pack", [lambda weight: weight, partial(pack_int4, group_size=32)], ids=["plain", "int4"])
def test_rows_scaled_down_by_a_power_of_two_are_scaled_back_after_the_sum(
    pack: Callable[[torch.Tensor], Any], gate: Gate | None, device: torch.device
) -> None:
    """So that float16 holds them: these would overflow."""
    total = normal(3, 128, dtype=torch.float16, device=device) * 3000
    norm_weight = normal(128, dtype=torch.float16, device=device, seed=1) * 16
    assert not (total * norm_weight).isfinite().all()
    weight = pack((normal(48, 128, dtype=torch.float32, device=device, seed=2) / math.sqrt(128)).half())
    squares = total.float().square().sum(-1)[None]
    bias = normal(48, dtype=torch.float16, device=device, seed=3)
    divided = Stream(total, total * (norm_weight / 64), squares)
    actual = fused_linear.normed_linear(divided, weight, EPS, bias=bias, gate=gate, factor=64.0)
    wide = Stream(total, total.float() * norm_weight.float(), squares)
    expected = reference.normed_linear(wide, weight, EPS, bias=bias, gate=gate)
    assert_near(actual, expected.half(), "matmul", scale=16 if gate is None else 256)


@SPLITS
def test_a_row_has_the_same_bits_in_any_batch(splits: int, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    set_splits(monkeypatch, splits)
    operands = inputs(7, 48, 128, torch.float16, device)
    together = fused_linear.linear_add(**operands)
    weight = normal(32, 48, dtype=torch.float16, device=device, seed=9)
    gated = fused_linear.normed_linear(together, weight, EPS, gate="silu")
    for row in (0, 5):
        alone = fused_linear.linear_add(
            operands["x"][row : row + 2], operands["weight"], operands["residual"][row : row + 2], operands["norm_weight"]
        )
        for one, other in zip(alone[:2], together[:2], strict=True):
            assert_same(one[0], other[row])
        assert_same(alone.squares[:, 0], together.squares[:, row])
        assert_same(fused_linear.normed_linear(alone, weight, EPS, gate="silu")[0], gated[row])


def test_an_empty_batch_gives_an_empty_result_and_too_many_rows_are_refused(device: torch.device) -> None:
    assert fused_linear.linear_add(**inputs(0, 32, 64, torch.float16, device)).total.shape == (0, 32)
    with pytest.raises(AssertionError, match="17 rows"):
        fused_linear.linear_add(**inputs(17, 32, 64, torch.float16, device))


@pytest.mark.parametrize("gated", [False, True])
def test_rows_of_32_bits_have_their_own_tiles_for_every_weight_format(gated: bool) -> None:
    """No tensor core multiplies them: with the tiles for 8-bit weights a thread spilled thousands of bytes."""
    for weight_bytes in (1, 4):
        tiles = fused_linear.fused_tiles(4096, 1024, 90, 132, gated=gated, weight_bytes=weight_bytes, row_bytes=4)
        assert (tiles.block_n, tiles.block_k, tiles.column_warps) == (16, 64, 1)


def test_tiles_depend_only_on_the_matrix_and_occupy_every_multiprocessor() -> None:
    for outputs, columns, gated in ((6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (4096, 14336, False)):
        tiles = fused_linear.fused_tiles(outputs, columns, 90, 132, gated=gated)
        assert -(-outputs // tiles.block_n) * tiles.splits >= 0.95 * 132
        assert (2 if gated else 1) * tiles.block_n * tiles.block_k * tiles.num_stages * 2 <= 200 * 1024
