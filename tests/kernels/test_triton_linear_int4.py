"""Products with 4-bit weights against the dequantised codes: every group size, split columns, permutations."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kernels.quantised_weights import Int4Weight, pack_gptq, pack_int4
from kernels.reference import quantised as reference
from kernels.triton.products import dequantised_slabs
from kernels.triton.products import int4 as kernel
from kernels.triton.products.int4 import Int4Tiles, int4_tiles, linear_int4
from kernels.triton.products.split_k import arrival_counters
from tests.support.interpreted_bf16 import correct_bf16
from tests.support.kernel_cases import Guarded, normal, padded_rows
from tests.support.kernel_tolerances import assert_near, assert_same

pytestmark = pytest.mark.usefixtures("poisoned_partial_sums")
HALF = torch.float16
SIZES = [(1, 8, 128), (3, 67, 96), (16, 33, 200), (17, 8, 300), (40, 130, 256)]  # M, N, K


def rows(num_rows: int, num_columns: int, device: torch.device, dtype: torch.dtype = HALF) -> torch.Tensor:
    """Rows with NaN behind each."""
    return padded_rows(normal(num_rows, num_columns, dtype=dtype, device=device), -(-num_columns // 8) * 8 + 8)


def int4_weight(num_rows: int, num_columns: int, device: torch.device, group_size: int = 128) -> Int4Weight:
    return pack_int4(normal(num_rows, num_columns, dtype=torch.float32, device=device, seed=1) * 0.1, group_size)


def compare(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None) -> None:
    out = Guarded((x.shape[0], weight.num_rows), x.dtype, x.device)
    linear_int4(x, weight, bias=bias, out=out.tensor)
    expected = reference.linear_int4(x, weight, bias=bias)
    assert_near(out.check(), expected, "matmul", scale=math.sqrt(weight.num_columns) * 0.3)


@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_few_rows_times_a_4_bit_weight_match_the_reference(
    sizes: tuple[int, int, int], group_size: int, device: torch.device
) -> None:
    num_rows, num_outputs, num_columns = sizes
    bias = normal(num_outputs, dtype=HALF, device=device, seed=7)
    compare(rows(num_rows, num_columns, device), int4_weight(num_outputs, num_columns, device, group_size), bias)


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16])
def test_scales_of_either_type_match_the_reference(scale_dtype: torch.dtype, device: torch.device) -> None:
    weight = pack_int4(normal(9, 256, dtype=torch.float32, device=device) * 0.1, 64, scale_dtype=scale_dtype)
    compare(rows(2, 256, device), weight)


def test_scales_may_be_negative(device: torch.device) -> None:
    """Their bits lie below a zero point in one word, so that a sign must not reach it."""
    weight = int4_weight(9, 256, device, 64)
    signs = torch.arange(weight.scales_zeros.numel(), device=device).view_as(weight.scales_zeros).remainder(2) << 15
    signed = replace(weight, scales_zeros=weight.scales_zeros ^ signs.to(torch.int32))
    assert not torch.equal(reference.dequantise(signed), reference.dequantise(weight))
    compare(rows(2, 256, device), signed)


@pytest.mark.parametrize("group_size", [32, 128])
def test_bfloat16_rows_match_the_reference(group_size: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        correct_bf16(monkeypatch)
    compare(rows(3, 200, device, torch.bfloat16), int4_weight(9, 200, device, group_size))


def test_every_code_and_zero_point_is_an_exact_integer(device: torch.device) -> None:
    """One column of x at a time gives the weight itself: codes 0 to 15 under zero points 1 to 16 of GPTQ's first format."""
    words = torch.tensor([0x76543210, 0xFEDCBA98 - 2**32], dtype=torch.int32, device=device)
    qweight = words.repeat(8).reshape(16, 1).expand(16, 16).contiguous()
    zeros = words.reshape(1, 2).contiguous()
    scales = torch.full((1, 16), 0.5, dtype=HALF, device=device)
    weight = pack_gptq(qweight, zeros, scales, None, 128)
    x = torch.eye(16, 128, dtype=HALF, device=device)
    expected = (torch.arange(16).reshape(16, 1) - (torch.arange(16) + 1)) * 0.5
    assert_same(linear_int4(x, weight).cpu(), expected.to(HALF))


def test_permuted_columns_match_the_reference(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    g_idx = (torch.randperm(256, generator=generator) // 64).to(device)
    qweight = torch.randint(-(2**31), 2**31, (32, 16), generator=generator).to(torch.int32).to(device)
    qzeros = torch.randint(-(2**31), 2**31, (4, 2), generator=generator).to(torch.int32).to(device)
    scales = (torch.rand(4, 16, generator=generator) * 0.01).to(HALF).to(device)
    weight = pack_gptq(qweight, qzeros, scales, g_idx, 64)
    x = rows(3, 256, device)
    expected = x.float() @ reference.dequantise_gptq(qweight, qzeros, scales, g_idx, 64).to(device).T
    assert_near(linear_int4(x, weight), expected.to(HALF), "matmul")


@pytest.mark.parametrize("splits", [2, 4, 8])
@pytest.mark.parametrize(("num_rows", "num_outputs", "num_columns"), [(1, 40, 900), (5, 16, 500)])
def test_divided_columns_match_the_reference(
    splits: int, num_rows: int, num_outputs: int, num_columns: int, device: torch.device
) -> None:
    x, weight = rows(num_rows, num_columns, device), int4_weight(num_outputs, num_columns, device)
    tiles = Int4Tiles(16, 32, num_warps=4, num_stages=3)
    out = Guarded((num_rows, num_outputs), torch.float32, device)
    kernel._launch(x, weight, replace(tiles, splits=splits), None, out.tensor)
    whole = kernel._launch(x, weight, tiles, None, torch.empty_like(out.tensor))
    torch.testing.assert_close(out.check(), whole, rtol=1e-5, atol=1e-5)
    assert not arrival_counters(device).any(), "the next launch finds the counters at zero"


def test_more_rows_than_the_smallest_tile_holds_match_the_reference(device: torch.device) -> None:
    compare(rows(67, 130, device), int4_weight(133, 130, device))


@pytest.mark.parametrize("group_size", [32, 128])
def test_many_rows_are_multiplied_with_unpacked_weights(
    group_size: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dequantised_slabs, "TILED_ROWS_MAX", 2)
    monkeypatch.setattr(dequantised_slabs, "SLAB_ELEMENTS", 256 * 32)
    bias = normal(70, dtype=HALF, device=device, seed=7)
    compare(rows(3, 200, device), int4_weight(70, 200, device, group_size), bias)


def test_unpacked_weights_are_rounded_once(device: torch.device) -> None:
    weight = int4_weight(70, 200, device, 32)
    out = Guarded((40, 256), HALF, device)
    kernel.dequantise_rows(weight, 20, out.tensor)
    assert_same(out.check()[:, :200], reference.dequantise(weight)[20:60].to(HALF))
    assert out.tensor.isfinite().all(), "columns that only fill the last chunk hold numbers, which nobody reads"


def test_rows_of_32_bits_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"rows of 16 bits, not torch\.float32"):
        linear_int4(rows(1, 128, device, torch.float32), int4_weight(8, 128, device))


def test_no_rows_give_no_rows(device: torch.device) -> None:
    assert linear_int4(rows(1, 128, device)[:0], int4_weight(9, 128, device)).shape == (0, 9)


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_up_to_64_rows_get_the_smallest_tile_that_holds_them(capability: int) -> None:
    lows = [int4_tiles(num_rows, 4096, 4096, capability, 132).block_m for num_rows in (1, 16, 17, 32, 33, 64, 65)]
    assert lows == [16, 16, 32, 32, 64, 64, 128 if capability == 90 else 64]
