"""PTX of Hopper's fused products of few rows with 4-bit weights."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from kernels.quantised_weights import Int4Weight, pack_int4
from kernels.reference import fused_linear as reference
from kernels.reference import quantised as exact
from kernels.residual_stream import Gate
from kernels.triton.products import hopper_tiles
from kernels.triton.products.fused_linear import linear_add, normed_linear
from kernels.triton.products.hopper_tiles import HopperTiles
from kernels.triton.products.int4 import linear_int4
from tests.support.fused_rows import CPU, EPS, check_edges, check_rows
from tests.support.kernel_cases import Guarded, normal, padded_rows
from tests.support.kernel_tolerances import assert_near, assert_same
from tests.support.ptx.card import EmulatedCard


def pack(outputs: int, columns: int, seed: int, scale_dtype: torch.dtype = torch.float16) -> Int4Weight:
    weight = normal(outputs, columns, dtype=torch.float32, device=CPU, seed=seed) / columns**0.5
    return pack_int4(weight + 0.01, 128, scale_dtype=scale_dtype)


@pytest.mark.parametrize(
    ("sizes", "gate", "dtype", "has_bias", "tiles"),
    [
        # width of the stream, columns, outputs of the gate
        ((96, 384, 80), "silu", torch.bfloat16, False, HopperTiles(4, 128)),
        # 19 chunks, outputs that are no multiple of 16
        ((72, 2432, 40), None, torch.bfloat16, True, HopperTiles(8, 128)),
        # columns that are no whole chunk
        ((160, 300, 24), "gelu_tanh", torch.float16, True, HopperTiles(8, 128)),
        ((72, 304, 24), "gelu_tanh", torch.float16, True, HopperTiles(4, 168, num_rows=2)),
        ((72, 2432, 40), None, torch.bfloat16, True, HopperTiles(8, 168, 32, num_rows=7)),
        ((96, 1304, 40), None, torch.bfloat16, False, HopperTiles(8, 168, 32, num_rows=8)),
        ((96, 384, 80), "silu", torch.bfloat16, False, HopperTiles(4, 168, num_rows=9)),
        ((128, 600, 48), None, torch.float16, True, HopperTiles(8, 168, num_rows=16)),
    ],
)
def test_fused_rows_with_4_bit_weights_match_the_reference(
    sizes: tuple[int, int, int],
    gate: Gate | None,
    dtype: torch.dtype,
    has_bias: bool,
    tiles: HopperTiles,
    card: EmulatedCard,
) -> None:
    """`tiles.num_rows` is the number of rows."""
    width, columns, inner = sizes
    scale_dtype = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    weights = pack(width, columns, 1, scale_dtype), pack(inner * (2 if gate else 1), width, 2, scale_dtype)
    launched = card.launched["fused_int4_rows_kernel"]
    padded = replace(tiles, num_rows=1 if tiles.num_rows == 1 else -(-tiles.num_rows // 8) * 8)
    with mock.patch.object(hopper_tiles, "tile_sizes", return_value=padded):
        check_rows(tiles.num_rows, *weights, sizes, gate, dtype, has_bias=has_bias)
    assert card.launched["fused_int4_rows_kernel"] > launched


@pytest.mark.parametrize("num_rows", [1, 2, 8, 9, 16])
def test_nothing_is_read_or_written_beyond_the_rows_and_outputs(num_rows: int) -> None:
    check_edges(num_rows, pack(72, 608, 1), hopper_tiles.tile_sizes(num_rows, 72, 1, gated=False, bits=4))


def test_a_row_among_others_has_the_bits_that_it_has_among_fewer() -> None:
    weights = pack(256, 1152, 1), pack(160, 256, 2)
    x, residual = (normal(16, size, dtype=torch.bfloat16, device=CPU, seed=size) for size in (1152, 256))
    norm_weight = torch.ones(256, dtype=torch.bfloat16)

    def multiply(rows: slice) -> torch.Tensor:
        return normed_linear(linear_add(x[rows], weights[0], residual[rows], norm_weight), weights[1], EPS, gate="silu")

    together = multiply(slice(None))
    for rows in (slice(3, 5), slice(4, 13)):
        assert_same(multiply(rows), together[rows])


@pytest.mark.parametrize("num_rows", [1, 9])
def test_reordered_columns_and_groups_of_two_chunks_match_the_reference(num_rows: int, card: EmulatedCard) -> None:
    weight = pack_int4(normal(48, 512, dtype=torch.float32, device=CPU) / 16, 256)
    weight = replace(weight, permutation=torch.randperm(512, generator=torch.Generator().manual_seed(1)))
    x, residual = (normal(num_rows, size, dtype=torch.bfloat16, device=CPU, seed=size) for size in (512, 48))
    norm_weight, launched = torch.ones(48, dtype=torch.bfloat16), card.launched["fused_int4_rows_kernel"]
    actual = linear_add(x, weight, residual, norm_weight)
    assert card.launched["fused_int4_rows_kernel"] > launched
    assert_near(actual.total, reference.linear_add(x, weight, residual, norm_weight).total, "matmul")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_zero_point_of_16_is_supported(dtype: torch.dtype) -> None:
    weight = pack_int4(normal(48, 256, dtype=torch.float32, device=CPU) / 16, 128)
    weight = replace(weight, scales_zeros=weight.scales_zeros & 0xFFFF | 16 << 16)
    x, residual = (normal(1, size, dtype=dtype, device=CPU, seed=size) for size in (256, 48))
    norm_weight = torch.ones(48, dtype=dtype)
    actual = linear_add(x, weight, residual, norm_weight)
    assert_near(actual.total, reference.linear_add(x, weight, residual, norm_weight).total, "matmul")


@pytest.mark.parametrize("num_rows", [1, 7, 16])
def test_a_product_without_a_norm_has_only_a_bias(num_rows: int, card: EmulatedCard) -> None:
    weight, bias = pack(72, 384, 1), normal(72, dtype=torch.bfloat16, device=CPU, seed=2)
    weight = replace(weight, permutation=torch.randperm(384, generator=torch.Generator().manual_seed(1)))
    x = padded_rows(normal(num_rows, 384, dtype=torch.bfloat16, device=CPU), 400)
    out, launched = Guarded((num_rows, 72), torch.bfloat16, CPU), card.launched["fused_int4_rows_kernel"]
    linear_int4(x, weight, bias=bias, out=out.tensor)
    assert_near(out.check(), x.float() @ exact.dequantise(weight).T + bias.float(), "matmul")
    assert card.launched["fused_int4_rows_kernel"] > launched


def test_smaller_groups_use_the_tiled_kernel(card: EmulatedCard) -> None:
    launched = card.launched["fused_int4_rows_kernel"]
    norm_weight = torch.ones(48, dtype=torch.bfloat16)
    weight = pack_int4(normal(48, 256, dtype=torch.float32, device=CPU) / 16, 64)
    x, residual = (normal(2, size, dtype=torch.bfloat16, device=CPU, seed=size) for size in (256, 48))
    actual = linear_add(x, weight, residual, norm_weight)
    assert_near(actual.total, reference.linear_add(x, weight, residual, norm_weight).total, "matmul")
    assert card.launched["fused_int4_rows_kernel"] == launched
