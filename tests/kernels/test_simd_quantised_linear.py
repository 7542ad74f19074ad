"""Products with weights in 8 and 4 bits, compiled for this processor, against the reference that reads single elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch

from kernels.quantised_weights import Fp8Weight, pack_fp8, pack_int4, pack_int4_codes, pack_int8
from kernels.reference import quantised as reference
from kernels.reference.fp8_rows import quantize_rows_fp8
from kernels.simd.fp8_linear import bind_fp8
from kernels.simd.int4_linear import bind_int4
from kernels.simd.int8_linear import bind_int8
from kernels.simd.linear import pack_linear
from kernels.simd.quantised_panels import DEPTH
from kernels.simd.quantised_tiles import PANEL
from kernels.simd.tiles import ROWS

Kernel = Callable[[torch.Tensor], torch.Tensor]

TOLERANCE = 1e-5  # float32 sums of at most some hundred products near one, beside float64
ROUNDED = {torch.float32: TOLERANCE, torch.float16: 2e-3, torch.bfloat16: 2e-2}
FORMATS = ["int8", "fp8", "int4"]


def product_and_reference(name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[Kernel, Kernel]:
    """The product of a format and its reference."""
    if name == "int8":
        int8 = pack_int8(weight)
        return bind_int8(int8, bias), lambda x: reference.linear_int8(x, int8, bias=bias)
    if name == "fp8":
        fp8 = pack_fp8(weight)
        return bind_fp8(fp8, bias), lambda x: reference.linear_fp8(x, fp8, bias=bias)
    int4 = pack_int4(weight, 32)
    return bind_int4(int4, bias), lambda x: reference.linear_int4(x, int4, bias=bias)


def rows_of(count: int, columns: int) -> torch.Tensor:
    rows: torch.Tensor = torch.randn(count, columns) / float(columns) ** 0.5
    return rows


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("outputs", "columns"), [(1, 1), (PANEL, 32), (PANEL + 1, 33), (3 * PANEL - 1, 257), (PANEL // 2, 500)]
)
def test_a_product_equals_its_reference(name: str, outputs: int, columns: int, threads: int) -> None:
    torch.manual_seed(outputs)
    for bias in (None, torch.randn(outputs)):
        multiply, expected = product_and_reference(name, torch.randn(outputs, columns), bias)
        for count in (1, 2, ROWS // 2, ROWS // 2 + 1, ROWS - 1, ROWS, ROWS + 1, 5 * ROWS + 1):
            x = rows_of(count, columns)
            assert_close(multiply(x), expected(x))


@pytest.mark.parametrize(("columns", "group_size"), [(64, 32), (200, 64), (500, 128), (256, 256), (130, 64), (300, 256)])
def test_groups_of_any_size_with_a_partial_last_group_match_the_reference(columns: int, group_size: int) -> None:
    torch.manual_seed(columns)
    for scale_dtype in (torch.float16, torch.bfloat16):
        weight, x = pack_int4(torch.randn(PANEL + 7, columns), group_size, scale_dtype=scale_dtype), rows_of(3, columns)
        assert_close(bind_int4(weight, None)(x), reference.linear_int4(x, weight))


@pytest.mark.parametrize("group_size", [-1, 64])
def test_reordered_columns_and_zero_points_of_sixteen_match_the_reference(group_size: int) -> None:
    torch.manual_seed(3)
    groups = 1 if group_size == -1 else 4
    codes, scales = torch.randint(0, 16, (24, 200), dtype=torch.uint8), torch.rand(groups, 24).half() - 0.5
    zeros = torch.randint(0, 17, (groups, 24))
    weight = pack_int4_codes(codes, scales, zeros, group_size, permutation=torch.randperm(200))
    x = rows_of(3, 200) / 8
    assert_close(bind_int4(weight, None)(x), reference.linear_int4(x, weight))


def test_every_e4m3_value_is_multiplied_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    weight = Fp8Weight(codes, torch.ones(256))
    products = bind_fp8(weight, None)(torch.ones(1, 1))[0]
    finite = ~codes[:, 0].float().isnan()
    assert torch.equal(products[finite], codes[finite, 0].float())


def test_inputs_in_e4m3_come_with_a_scale_of_each_row_or_of_all() -> None:
    torch.manual_seed(4)
    weight, bias, x = pack_fp8(torch.randn(40, 96)), torch.randn(40), rows_of(5, 96)
    values, scales = quantize_rows_fp8(x)
    for x_scales in (scales, torch.tensor([0.01])):
        actual = bind_fp8(weight, bias)(values, x_scales=x_scales, out_dtype=torch.float32)
        expected = reference.linear_fp8(values, weight, x_scales=x_scales, out_dtype=torch.float32, bias=bias)
        assert_close(actual, expected)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("columns", [300, DEPTH + 100])
def test_a_row_has_the_same_bits_in_any_batch(name: str, columns: int, threads: int) -> None:
    """Weights are decoded in registers for few rows, once and stored for many, DEPTH columns at a time."""
    torch.manual_seed(5)
    multiply, _ = product_and_reference(name, torch.randn(PANEL + 9, columns), torch.randn(PANEL + 9))
    x = rows_of(512, columns)
    one_by_one = torch.cat([multiply(row[None]) for row in x])
    for count in (*range(2, 65), 128, 512):
        assert torch.equal(multiply(x[:count]), one_by_one[:count]), count


@pytest.mark.parametrize("group_size", [32, 128, 384, -1])
@pytest.mark.parametrize("count", [1, ROWS, 5 * ROWS + 3])
def test_int4_products_have_the_bits_of_float32_products_of_the_dequantised_weights(group_size: int, count: int) -> None:
    torch.manual_seed(7)
    columns = DEPTH + 96
    groups = 1 if group_size == -1 else -(-columns // group_size)
    codes, zeros = torch.randint(0, 16, (PANEL, columns), dtype=torch.uint8), torch.randint(0, 17, (groups, PANEL))
    weight = pack_int4_codes(codes, torch.rand(groups, PANEL).half() - 0.5, zeros, group_size)
    x = rows_of(count, columns)
    assert torch.equal(bind_int4(weight, None)(x), pack_linear(reference.dequantise(weight), None)(x))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
def test_results_have_the_dtype_of_the_inputs_which_are_not_changed(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    multiply, expected = product_and_reference(name, torch.randn(40, 64), None)
    x = rows_of(3, 128).to(dtype)[:, ::2]
    before = x.clone()
    actual = multiply(x)
    assert actual.dtype is dtype
    assert_close(actual, expected(x), ROUNDED[dtype])
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", FORMATS)
def test_non_finite_inputs_affect_only_their_row_and_no_rows_give_no_rows(name: str) -> None:
    multiply, _ = product_and_reference(name, torch.ones(PANEL + 16, 32), None)
    for odd, count in product((math.nan, math.inf), (2, 5 * ROWS)):
        for row in {1, count - 1}:
            x = torch.ones(count, 32)
            x[row, 3] = odd
            finite = multiply(x).isfinite()
            assert bool(finite[torch.arange(count) != row].all())
            assert not bool(finite[row].any())
    assert multiply(torch.ones(0, 32)).shape == (0, PANEL + 16)


def test_a_product_does_not_read_its_weight_again() -> None:
    weight, x = pack_int8(torch.ones(40, 8)), torch.ones(2, 8)
    multiply = bind_int8(weight, None)
    expected = multiply(x)
    weight.values.fill_(7)
    assert torch.equal(multiply(x), expected)
