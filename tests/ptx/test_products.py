"""PTX of products with weights of 16, 8 and 4 bits: plain, fused, batch-invariant."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from kernels.quantised_weights import Int4Weight, pack_fp8
from kernels.reference import fused_linear as reference
from kernels.reference import quantised as exact
from kernels.residual_stream import Gate
from kernels.triton.invariant.int4 import invariant_int4
from kernels.triton.invariant.linear import invariant_linear
from kernels.triton.products import dequantised_slabs
from kernels.triton.products.fp8 import linear_fp8
from kernels.triton.products.fused_linear import linear_add, normed_linear
from kernels.triton.products.int4 import dequantise_rows, linear_int4
from kernels.triton.products.int8 import linear_int8
from kernels.triton.products.linear import linear
from kernels.triton.rows.fp8 import quantize_rows_fp8
from tests.support.kernel_cases import normal, padded_rows
from tests.support.kernel_tolerances import assert_near, assert_same
from tests.support.ptx.block import FORWARD, REVERSE
from tests.support.ptx.card import EmulatedCard
from tests.support.ptx.weight_packers import PACKERS, pack_groups

CPU = torch.device("cpu")
BF16 = torch.bfloat16
EPS = 1e-6
Kernel = Callable[..., torch.Tensor]


def rows(count: int, width: int, *, seed: int = 0) -> torch.Tensor:
    """[count, width] bfloat16 among NaN."""
    return padded_rows(normal(count, width, dtype=BF16, device=CPU, seed=seed), width + 16)


def weights(outputs: int, columns: int, *, seed: int = 1) -> torch.Tensor:
    """[outputs, columns] bfloat16 whose products are of order one."""
    return (normal(outputs, columns, dtype=torch.float32, device=CPU, seed=seed) / math.sqrt(columns)).to(BF16)


@pytest.mark.parametrize(
    ("kind", "kernel", "sizes"),
    [
        ("bf16", linear, (3, 80, 1040)),  # rows, outputs, columns
        ("bf16", linear, (1, 48, 8192)),
        ("int8", linear_int8, (3, 80, 528)),
        ("int8", linear_int8, (40, 80, 528)),
        ("int8", linear_int8, (130, 144, 272)),
        ("fp8", linear_fp8, (3, 80, 512)),
        ("fp8", linear_fp8, (40, 64, 256)),
        ("int4", linear_int4, (2, 80, 384)),
        ("int4", linear_int4, (130, 144, 384)),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else None,
)
def test_products_match_the_exact_ones(kind: str, kernel: Kernel, sizes: tuple[int, int, int]) -> None:
    count, outputs, columns = sizes
    pack = PACKERS[kind]
    x, weight = rows(count, columns), pack(weights(outputs, columns))
    assert_near(kernel(x, weight), x.float() @ exact.dequantise(weight).T, "matmul")


@pytest.mark.parametrize(
    ("kernel", "count", "adds_waits"), [(linear_fp8, 3, False), (linear_fp8, 64, True), (invariant_linear, 3, True)]
)
def test_fp8_rows_times_fp8_weights_match_the_exact_product(
    card: EmulatedCard, kernel: Kernel, count: int, adds_waits: bool
) -> None:
    """In tiles of 64 rows Triton (3.6 and 3.9) adds a product to its sum before waiting for it: the assembler adds the wait."""
    card.adds_waits = adds_waits
    codes, scales = quantize_rows_fp8(rows(count, 512))
    weight = pack_fp8(weights(80, 512))
    actual = kernel(codes, weight, x_scales=scales, out_dtype=BF16)
    assert_near(actual, codes.float() * scales @ exact.dequantise(weight).T, "matmul")


@pytest.mark.parametrize(("kind", "kernel"), [("bf16", linear), ("int4", linear_int4)])
def test_float16_products_match_the_exact_ones(kind: str, kernel: Kernel) -> None:
    pack = PACKERS[kind]
    x, weight = rows(3, 384).half(), pack(weights(80, 384).half())
    assert_near(kernel(x, weight), x.float() @ exact.dequantise(weight).T, "matmul")


@pytest.mark.parametrize(("kind", "dtype"), [("int8", BF16), ("int8", torch.float16), ("fp8", BF16)])
def test_dequantised_8_bit_weights_are_rounded_once(kind: str, dtype: torch.dtype) -> None:
    weight = PACKERS[kind](weights(80, 400))
    out = torch.empty(48, 400, dtype=dtype)
    dequantised_slabs.dequantise_rows(weight, 16, out)
    assert_same(out, exact.dequantise(weight)[16:64].to(dtype))


@pytest.mark.parametrize(("kind", "kernel"), [("int8", linear_int8), ("int4", linear_int4)])
def test_products_of_many_rows_in_slabs_match_the_exact_ones(
    kind: str, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dequantised_slabs, "TILED_ROWS_MAX", 16)
    monkeypatch.setattr(dequantised_slabs, "SLAB_ELEMENTS", 32 * 384)
    x, weight = rows(17, 384), PACKERS[kind](weights(80, 384))
    assert_near(kernel(x, weight), x.float() @ exact.dequantise(weight).T, "matmul")


def test_dequantised_4_bit_weights_match_the_exact_ones() -> None:
    weight = pack_groups(weights(80, 384))
    out = torch.empty(48, 384, dtype=BF16)
    dequantise_rows(weight, 16, out)
    assert_near(out, exact.dequantise(weight)[16:64], "pointwise")


@pytest.mark.parametrize(
    ("kind", "sizes", "gate"),
    [
        ("bf16", (3, 96, 272, 80), "silu"),  # rows, width of the stream, columns before it, columns behind the gate
        ("bf16", (1, 64, 8192, 48), None),
        ("int8", (3, 96, 272, 80), "gelu_tanh"),
        ("fp8", (16, 96, 272, 80), "silu"),
        ("int4", (5, 256, 384, 160), "silu"),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else None,
)
def test_fused_linear_add_and_normed_linear_match_the_reference(
    kind: str, sizes: tuple[int, int, int, int], gate: Gate | None
) -> None:
    count, width, columns, inner = sizes
    pack = PACKERS[kind]
    first_weight, second_weight = pack(weights(width, columns)), pack(weights(inner * (2 if gate else 1), width, seed=2))
    operands = rows(count, columns), first_weight, normal(count, width, dtype=BF16, device=CPU, seed=3)
    norm_weight = normal(width, dtype=BF16, device=CPU, seed=4)
    actual, expected = linear_add(*operands, norm_weight, alpha=0.5), reference.linear_add(*operands, norm_weight, alpha=0.5)
    assert_near(actual.total, expected.total, "matmul")
    assert_near(actual.weighted, expected.weighted, "matmul", scale=4)
    assert_near(actual.squares.sum(0), actual.total.float().square().sum(-1), "matmul")
    product = normed_linear(actual, second_weight, EPS, gate=gate)
    assert_near(product, reference.normed_linear(actual, second_weight, EPS, gate=gate), "matmul", scale=8)


def test_split_sums_do_not_depend_on_the_order_of_the_programs(card: EmulatedCard) -> None:
    """Whichever program arrives last adds all splits, in their order."""
    x, weight = rows(1, 4096), weights(16, 4096)
    before = card.launched["linear_kernel"]
    actual = linear(x, weight)
    assert card.launched["linear_kernel"] - before > 16 // 16, "more programs than tiles: the columns are split"
    for order in (FORWARD, REVERSE):
        card.order = order
        assert_same(linear(x, weight), actual)


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("count", [5, 70])
def test_a_row_has_the_same_bits_in_any_batch(kind: str, count: int) -> None:
    pack = PACKERS[kind]
    weight = pack(weights(80, 384))
    kernel: Kernel = invariant_int4 if isinstance(weight, Int4Weight) else invariant_linear
    x = rows(count, 384)
    actual = kernel(x, weight)
    assert_near(actual, x.float() @ exact.dequantise(weight).T, "matmul")
    assert_same(kernel(x[2:3], weight), actual[2:3])
