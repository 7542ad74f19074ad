"""Decoding 8- and 4-bit weights on a CPU: the same numbers as torch's own conversion and the bit-by-bit reader."""

from __future__ import annotations

import pytest
import torch

from kernels import ops
from kernels.cpu.decoded_linear import DECODED_ELEMENTS
from kernels.cpu.fp8_decode import decode_fp8, decode_kv
from kernels.cpu.int8_digits import is_exact
from kernels.quantised_weights import pack_int4, pack_int4_codes
from kernels.reference import quantised as reference
from kernels.reference.fp8_rows import quantize_rows_fp8

SUM_TOLERANCE = 1e-5  # float32 sums of at most 512 products near one, beside float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_number_of_e4m3_is_decoded_as_torch_does(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[~codes.float().isnan()]
    torch.testing.assert_close(decode_fp8(codes, dtype), codes.to(dtype), rtol=0, atol=0)


def test_keys_and_values_have_scales_of_their_own() -> None:
    slots = torch.randn(3, 2, 4, 8).to(torch.float8_e4m3fn)
    decoded = decode_kv(slots, torch.float32, torch.tensor([2.0, 0.5]))
    torch.testing.assert_close(decoded[:, 0], slots[:, 0].float() * 2.0, rtol=0, atol=0)
    torch.testing.assert_close(decoded[:, 1], slots[:, 1].float() * 0.5, rtol=0, atol=0)


@pytest.mark.parametrize("num_rows", [1, 15, 16, 17])
@pytest.mark.parametrize("num_columns", [32, 96, 500])
def test_products_with_8_bits_equal_the_reference(num_rows: int, num_columns: int) -> None:
    torch.manual_seed(num_rows)
    weight, x = torch.randn(40, num_columns), torch.randn(num_rows, num_columns) / num_columns**0.5
    int8, fp8 = ops.pack_int8(weight), ops.pack_fp8(weight)
    assert_close(ops.linear_int8(x, int8), reference.linear_int8(x, int8))
    assert_close(ops.linear_fp8(x, fp8), reference.linear_fp8(x, fp8))
    values, scales = quantize_rows_fp8(x)
    expected = reference.linear_fp8(values, fp8, x_scales=scales, out_dtype=torch.float32)
    assert_close(ops.linear_fp8(values, fp8, x_scales=scales, out_dtype=torch.float32), expected)


@pytest.mark.parametrize(("num_columns", "group_size"), [(64, 32), (200, 64), (500, 128), (256, 256), (130, 64)])
def test_products_with_4_bits_equal_the_reference(num_columns: int, group_size: int) -> None:
    torch.manual_seed(num_columns)
    weight, x = torch.randn(24, num_columns), torch.randn(3, num_columns) / num_columns**0.5
    packed = pack_int4(weight, group_size)
    assert_close(ops.linear_int4(x, packed), reference.linear_int4(x, packed))


def test_one_group_and_columns_in_another_order_equal_the_reference() -> None:
    torch.manual_seed(3)
    codes, scales = torch.randint(0, 16, (24, 200), dtype=torch.uint8), torch.rand(1, 24).half()
    packed = pack_int4_codes(codes, scales, torch.randint(0, 17, (1, 24)), -1, permutation=torch.randperm(200))
    x = torch.randn(3, 200) / 200
    assert_close(ops.linear_int4(x, packed), reference.linear_int4(x, packed))


def test_a_matrix_that_is_decoded_piece_by_piece_gives_what_it_gives_at_once() -> None:
    torch.manual_seed(4)
    rows = DECODED_ELEMENTS // 512 + 7
    packed, x = ops.pack_int8(torch.randn(rows, 512)), torch.randn(2, 512) / 512**0.5
    assert_close(ops.linear_int8(x, packed), reference.linear_int8(x, packed))


@pytest.mark.skipif(not is_exact(), reason="this processor does not multiply 8-bit integers exactly")
@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 70])
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (33, 100), (130, 511)])
def test_inputs_of_two_digits_are_as_exact_as_16_bits(num_rows: int, rows: int, columns: int) -> None:
    torch.manual_seed(rows + num_rows)
    weight, bias = ops.pack_int8(torch.randn(rows, columns)), torch.randn(rows)
    x = torch.randn(num_rows, columns) * torch.logspace(-3, 3, num_rows)[:, None]
    x[-1] = 0.0
    found, expected = ops.bind_int8(weight, bias)(x), reference.linear_int8(x, weight, bias=bias)
    bound = x.abs().amax(dim=1, keepdim=True) / 64516 * weight.values.abs().sum(dim=1) * weight.scales
    assert bool(((found - expected).abs() <= bound + 1e-5 * expected.abs() + 1e-6).all())


@pytest.mark.skipif(not is_exact(), reason="this processor does not multiply 8-bit integers exactly")
def test_a_row_of_two_digits_has_the_same_bits_in_any_batch() -> None:
    torch.manual_seed(5)
    multiply, x = ops.bind_int8(ops.pack_int8(torch.randn(40, 300)), None), torch.randn(33, 300)
    together = multiply(x)
    assert all(torch.equal(multiply(x[row : row + 1])[0], together[row]) for row in range(33))


def test_what_is_not_finite_stays_so() -> None:
    multiply = ops.bind_int8(ops.pack_int8(torch.ones(16, 32)), None)
    for odd in (float("nan"), float("inf")):
        x = torch.ones(2, 32)
        x[1, 3] = odd
        finite = multiply(x).isfinite()
        assert bool(finite[0].all())
        assert not bool(finite[1].any())


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=SUM_TOLERANCE, atol=SUM_TOLERANCE)
