"""PTX of Hopper's fused GEMV with 4-bit weights."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from kernels.quantised_weights import Int4Weight, pack_int4
from kernels.reference import fused_linear as reference
from kernels.residual_stream import Gate
from kernels.triton import fused_int4
from kernels.triton.fused_linear import linear_add
from kernels.triton.hopper_gemv import HopperGemvTiles
from tests.support.fused_rows import CPU, check_row
from tests.support.kernel_cases import normal
from tests.support.kernel_tolerances import assert_near
from tests.support.ptx.card import EmulatedCard


@pytest.mark.parametrize(
    ("sizes", "gate", "dtype", "has_bias", "num_warps"),
    [
        ((96, 384, 80), "silu", torch.bfloat16, False, 4),  # width of the stream, columns, outputs of the gate
        ((72, 2432, 40), None, torch.bfloat16, True, 8),  # 19 chunks, outputs that are no multiple of 16
        ((160, 300, 24), "gelu_tanh", torch.float16, True, 8),  # columns that are no whole chunk
    ],
)
def test_a_fused_row_with_4_bit_weights_matches_the_reference(
    sizes: tuple[int, int, int], gate: Gate | None, dtype: torch.dtype, has_bias: bool, num_warps: int, card: EmulatedCard
) -> None:
    width, columns, inner = sizes
    scale_dtype = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16

    def pack(outputs: int, count: int, seed: int) -> Int4Weight:
        weight = normal(outputs, count, dtype=torch.float32, device=CPU, seed=seed) / count**0.5
        return pack_int4(weight + 0.01, 128, scale_dtype=scale_dtype)

    first_weight, second_weight = pack(width, columns, 1), pack(inner * (2 if gate else 1), width, 2)
    launched = card.launched["fused_int4_row_kernel"]
    with mock.patch.object(fused_int4, "hopper_gemv_tiles", return_value=HopperGemvTiles(num_warps)):
        check_row(first_weight, second_weight, sizes, gate, dtype, has_bias=has_bias)
    assert card.launched["fused_int4_row_kernel"] > launched


def test_reordered_columns_and_groups_of_two_chunks_match_the_reference(card: EmulatedCard) -> None:
    weight = pack_int4(normal(48, 512, dtype=torch.float32, device=CPU) / 16, 256)
    weight = replace(weight, permutation=torch.randperm(512, generator=torch.Generator().manual_seed(1)))
    x, residual = (normal(1, size, dtype=torch.bfloat16, device=CPU, seed=size) for size in (512, 48))
    norm_weight, launched = torch.ones(48, dtype=torch.bfloat16), card.launched["fused_int4_row_kernel"]
    actual = linear_add(x, weight, residual, norm_weight)
    assert card.launched["fused_int4_row_kernel"] > launched
    assert_near(actual.total, reference.linear_add(x, weight, residual, norm_weight).total, "matmul")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_zero_point_of_16_is_supported(dtype: torch.dtype) -> None:
    weight = pack_int4(normal(48, 256, dtype=torch.float32, device=CPU) / 16, 128)
    weight = replace(weight, scales_zeros=weight.scales_zeros & 0xFFFF | 16 << 16)
    x, residual = (normal(1, size, dtype=dtype, device=CPU, seed=size) for size in (256, 48))
    norm_weight = torch.ones(48, dtype=dtype)
    actual = linear_add(x, weight, residual, norm_weight)
    assert_near(actual.total, reference.linear_add(x, weight, residual, norm_weight).total, "matmul")


def test_smaller_groups_and_more_rows_use_the_tiled_kernel(card: EmulatedCard) -> None:
    norm_weight, launched = torch.ones(48, dtype=torch.bfloat16), card.launched["fused_int4_row_kernel"]
    for count, group in ((1, 64), (2, 128)):
        weight = pack_int4(normal(48, 256, dtype=torch.float32, device=CPU) / 16, group)
        x, residual = (normal(count, size, dtype=torch.bfloat16, device=CPU, seed=size) for size in (256, 48))
        actual = linear_add(x, weight, residual, norm_weight)
        assert_near(actual.total, reference.linear_add(x, weight, residual, norm_weight).total, "matmul")
    assert card.launched["fused_int4_row_kernel"] == launched
