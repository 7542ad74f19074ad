"""Packed weights equal the values of the checkpoint layouts bit by bit; quantised weights are close to the originals."""

from __future__ import annotations

import pytest
import torch

from kernels.quantised_weights import (
    Fp8Weight,
    Int8Weight,
    pack_awq,
    pack_fp8,
    pack_gptq,
    pack_int4,
    pack_int4_codes,
    pack_int8,
)
from kernels.reference import quantised as reference
from kernels.reference.fp8_rows import quantize_rows_fp8

WORD = 0x76543210  # the nibble at bits 4·i is i


def random_words(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)


def random_scales(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return (torch.rand(*shape, generator=generator) * 0.02 + 0.001).to(dtype)


def test_the_nibbles_of_an_awq_word_are_outputs_0_2_4_6_1_3_5_7() -> None:
    qweight = torch.full((32, 1), WORD, dtype=torch.int32)
    dequantised = reference.dequantise_awq(qweight, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 8), 32)
    assert dequantised[:, 5].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_the_zero_points_of_awq_are_packed_as_its_weights_are() -> None:
    zeros = torch.full((1, 1), WORD, dtype=torch.int32)
    dequantised = reference.dequantise_awq(torch.zeros(32, 1, dtype=torch.int32), zeros, torch.ones(1, 8), 32)
    assert dequantised[:, 31].tolist() == [0, -4, -1, -5, -2, -6, -3, -7]


def test_the_nibbles_of_a_gptq_word_are_eight_inputs_in_order() -> None:
    qweight = torch.full((4, 8), WORD, dtype=torch.int32)
    zeros = torch.zeros(1, 1, dtype=torch.int32)
    dequantised = reference.dequantise_gptq(qweight, zeros, torch.ones(1, 8), None, 32, zeros_minus_one=False)
    assert dequantised[3].tolist() == list(range(8)) * 4


def test_gptq_stores_zero_points_minus_one_in_its_first_format_only() -> None:
    qweight = torch.zeros(4, 8, dtype=torch.int32)
    zeros = torch.full((1, 1), WORD, dtype=torch.int32)
    first = reference.dequantise_gptq(qweight, zeros, torch.ones(1, 8), None, 32)
    second = reference.dequantise_gptq(qweight, zeros, torch.ones(1, 8), None, 32, zeros_minus_one=False)
    assert first[:, 0].tolist() == [-1, -2, -3, -4, -5, -6, -7, -8]
    assert second[:, 0].tolist() == [0, -1, -2, -3, -4, -5, -6, -7]


@pytest.mark.parametrize("group_size", [32, 64, 128, 256, -1])
@pytest.mark.parametrize(("num_columns", "num_rows"), [(256, 16), (384, 8), (768, 24)])
def test_packed_awq_weights_equal_those_of_the_checkpoint(group_size: int, num_columns: int, num_rows: int) -> None:
    groups = 1 if group_size == -1 else -(-num_columns // group_size)
    tensors = (
        random_words(num_columns, num_rows // 8),
        random_words(groups, num_rows // 8, seed=1),
        random_scales(groups, num_rows),
    )
    packed = pack_awq(*tensors, group_size)
    assert torch.equal(reference.dequantise(packed), reference.dequantise_awq(*tensors, group_size))


@pytest.mark.parametrize("zeros_minus_one", [True, False])
@pytest.mark.parametrize("group_size", [32, 64, 128, 256, -1])
@pytest.mark.parametrize(("num_columns", "num_rows"), [(256, 16), (384, 8), (96, 8)])
def test_packed_gptq_weights_equal_those_of_the_checkpoint(
    group_size: int, num_columns: int, num_rows: int, zeros_minus_one: bool
) -> None:
    groups = 1 if group_size == -1 else -(-num_columns // group_size)
    qweight, qzeros = random_words(num_columns // 8, num_rows), random_words(groups, num_rows // 8, seed=1)
    scales = random_scales(groups, num_rows, dtype=torch.bfloat16)
    packed = pack_gptq(qweight, qzeros, scales, None, group_size, zeros_minus_one=zeros_minus_one)
    expected = reference.dequantise_gptq(qweight, qzeros, scales, None, group_size, zeros_minus_one=zeros_minus_one)
    assert torch.equal(reference.dequantise(packed), expected)


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_gptq_columns_in_the_order_of_activations_are_sorted_and_the_permutation_kept(group_size: int) -> None:
    shuffled = torch.randperm(256, generator=torch.Generator().manual_seed(2)) // group_size
    tensors = random_words(32, 16), random_words(256 // group_size, 2, seed=1), random_scales(256 // group_size, 16)
    packed = pack_gptq(*tensors, shuffled.to(torch.int32), group_size)
    assert packed.permutation is not None
    expected = reference.dequantise_gptq(*tensors, shuffled, group_size)
    assert torch.equal(reference.dequantise(packed), expected)


def test_gptq_columns_that_are_sorted_need_no_permutation() -> None:
    g_idx = torch.arange(256, dtype=torch.int32) // 128
    packed = pack_gptq(random_words(32, 8), random_words(2, 1), random_scales(2, 8), g_idx, 128)
    assert packed.permutation is None


def test_groups_of_unequal_size_are_refused() -> None:
    g_idx = torch.zeros(256, dtype=torch.int32)
    g_idx[-3:] = 1
    with pytest.raises(ValueError, match="g_idx does not divide 256 columns into groups of 128"):
        pack_gptq(random_words(32, 8), random_words(2, 1), random_scales(2, 8), g_idx, 128)


@pytest.mark.parametrize("group_size", [16, 48, 96, 192])
def test_groups_that_the_layout_cannot_hold_are_refused(group_size: int) -> None:
    groups = -(-384 // group_size)
    with pytest.raises(ValueError, match=f"groups of {group_size} columns are not supported"):
        pack_awq(random_words(384, 1), random_words(groups, 1), random_scales(groups, 8), group_size)


def test_scales_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scales are \[3, 8\], expected \[2, 8\]"):
        pack_awq(random_words(256, 1), random_words(2, 1), random_scales(3, 8), 128)


def test_float32_scales_are_accepted_only_if_16_bits_hold_them_exactly() -> None:
    codes, zeros = torch.zeros(8, 128, dtype=torch.uint8), torch.ones(1, 8, dtype=torch.uint8)
    scales = random_scales(1, 8).float()
    assert torch.equal(reference.dequantise(pack_int4_codes(codes, scales, zeros, 128))[:, 0], -scales[0])
    with pytest.raises(ValueError, match="neither float16 nor bfloat16 holds exactly"):
        pack_int4_codes(codes, scales + 1e-9, zeros, 128)


@pytest.mark.parametrize("num_columns", [1, 17, 96, 128, 200])
def test_columns_beyond_the_last_are_zero(num_columns: int) -> None:
    codes = torch.full((3, num_columns), 15, dtype=torch.uint8)
    groups = -(-num_columns // 32)
    packed = pack_int4_codes(codes, random_scales(groups, 3), torch.full((groups, 3), 16, dtype=torch.uint8), 32)
    assert packed.words.shape == (-(-num_columns // 128), 3, 32)
    bits = sum(int((packed.words >> (4 * run) & 15 == 15).sum()) for run in range(4))
    assert bits == 3 * num_columns
    assert int((packed.scales_zeros != 0).sum()) == 3 * groups


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_four_bits_are_at_most_half_a_step_from_the_weight(group_size: int) -> None:
    weight = torch.randn(5, 300, generator=torch.Generator().manual_seed(3))
    packed = pack_int4(weight, group_size)
    steps = (
        (packed.scales_zeros & 0xFFFF).to(torch.int16).view(torch.float16).float().repeat_interleave(group_size, 0).T[:, :300]
    )
    # The outermost codes may lose a little more: the scale is rounded to 16 bits, and 15 steps of it must span the group.
    assert ((reference.dequantise(packed) - weight).abs() <= steps * 0.52).all()


def test_eight_bits_are_at_most_half_a_step_from_the_weight() -> None:
    weight = torch.randn(7, 67, generator=torch.Generator().manual_seed(3))
    weight[2] = 0
    packed = pack_int8(weight)
    assert packed.scales[2] == 0
    assert packed.values.abs().amax(dim=1).tolist() == [127, 127, 0, 127, 127, 127, 127]
    assert ((reference.dequantise(packed) - weight).abs() <= packed.scales.unsqueeze(1) * 0.5001).all()


def test_fp8_weights_are_within_their_three_bits_of_mantissa() -> None:
    weight = torch.randn(7, 67, generator=torch.Generator().manual_seed(3))
    weight[2] = 0
    packed = pack_fp8(weight)
    error = (reference.dequantise(packed) - weight).abs()
    assert (error <= weight.abs() * 2**-4 * 1.001 + packed.scales.unsqueeze(1) * 2**-10).all()


@pytest.mark.parametrize(("weight", "dtype"), [(Fp8Weight, torch.float8_e4m3fn), (Int8Weight, torch.int8)])
@pytest.mark.parametrize("scales", [torch.ones(1), torch.ones(6), torch.ones(7, 1), torch.tensor(1.0)])
def test_a_weight_in_8_bits_has_one_scale_for_each_row(
    weight: type[Fp8Weight | Int8Weight], dtype: torch.dtype, scales: torch.Tensor
) -> None:
    values = torch.zeros(7, 16, dtype=dtype)
    assert weight(values, torch.ones(7)).scales.shape == (7,)
    with pytest.raises(ValueError, match=r"expected one for each row: \[7\]"):
        weight(values, scales)


def test_products_with_quantised_weights_equal_products_with_the_dequantised_weights() -> None:
    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(6, 64, generator=generator), torch.randn(3, 64, generator=generator)
    int8, int4, fp8, out = pack_int8(weight), pack_int4(weight, 32), pack_fp8(weight), torch.empty(3, 6)
    for product, dequantised in (
        (reference.linear_int8(x, int8, out=out), reference.dequantise(int8)),
        (reference.linear_int4(x, int4), reference.dequantise(int4)),
        (reference.linear_fp8(x, fp8), reference.dequantise(fp8)),
    ):
        torch.testing.assert_close(product, x @ dequantised.T)
    assert torch.equal(out, reference.linear_int8(x, int8))


def test_quantised_rows_times_their_scales_are_close_to_the_rows() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 32, generator=generator)
    x[1] = 0
    values, scales = quantize_rows_fp8(x)
    assert ((values.float() * scales - x).abs() <= x.abs() * 2**-4 + scales * 2**-10).all()
    weight = pack_fp8(torch.randn(6, 32, generator=generator))
    product = reference.linear_fp8(values, weight, x_scales=scales, out_dtype=torch.float32)
    torch.testing.assert_close(product, (values.float() * scales) @ reference.dequantise(weight).T)
