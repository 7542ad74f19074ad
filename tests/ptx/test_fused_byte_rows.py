"""PTX of Hopper's fused products of few rows with 8-bit weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch

from kernels.quantised_weights import Fp8Weight, Int8Weight, pack_fp8, pack_int8
from kernels.reference import quantised as exact
from kernels.residual_stream import Gate
from kernels.triton.products import hopper_tiles
from kernels.triton.products.fp8 import linear_fp8
from kernels.triton.products.fused_linear import linear_add, normed_linear
from kernels.triton.products.hopper_tiles import HopperTiles
from kernels.triton.products.int8 import linear_int8
from kernels.triton.sampling.greedy_head import bind_greedy_head
from tests.support.fused_rows import CPU, EPS, check_edges, check_rows
from tests.support.kernel_cases import Guarded, normal, padded_rows
from tests.support.kernel_tolerances import assert_near, assert_same
from tests.support.ptx.card import EmulatedCard

Pack = Callable[[torch.Tensor], Int8Weight | Fp8Weight]
PACKERS: dict[str, Pack] = {"int8": pack_int8, "fp8": pack_fp8}


@pytest.fixture(autouse=True)
def single_multiprocessor() -> object:
    with mock.patch.object(hopper_tiles, "multiprocessors", return_value=1):
        yield


def pack(kind: str, outputs: int, count: int, seed: int) -> Int8Weight | Fp8Weight:
    weight = normal(outputs, count, dtype=torch.float32, device=CPU, seed=seed) / count**0.5
    return PACKERS[kind](weight + 0.01)


@pytest.mark.parametrize(
    ("kind", "sizes", "gate", "dtype", "has_bias", "tiles"),
    [  # both types of rows, products with and without a gate, each number of warps twice
        # width of the stream, columns, outputs of the gate
        ("int8", (128, 384, 80), "silu", torch.bfloat16, False, HopperTiles(4, 128)),
        # 19 chunks, outputs that are no multiple of 16
        ("fp8", (256, 2432, 40), None, torch.bfloat16, True, HopperTiles(8, 128)),
        ("fp8", (128, 256, 24), "gelu_tanh", torch.float16, True, HopperTiles(4, 128)),
        ("fp8", (128, 384, 80), "silu", torch.bfloat16, False, HopperTiles(8, 128)),
        ("int8", (128, 384, 24), "gelu_tanh", torch.float16, True, HopperTiles(4, 168, num_rows=2)),
        ("fp8", (256, 2432, 40), None, torch.bfloat16, True, HopperTiles(8, 168, 32, num_rows=7)),
        ("int8", (256, 1280, 40), None, torch.bfloat16, False, HopperTiles(8, 168, 32, num_rows=8)),
        ("fp8", (128, 384, 80), "silu", torch.bfloat16, False, HopperTiles(4, 168, num_rows=9)),
        ("int8", (128, 640, 48), None, torch.float16, True, HopperTiles(8, 168, num_rows=16)),
    ],
)
def test_fused_rows_with_8_bit_weights_match_the_reference(
    kind: str,
    sizes: tuple[int, int, int],
    gate: Gate | None,
    dtype: torch.dtype,
    has_bias: bool,
    tiles: HopperTiles,
    card: EmulatedCard,
) -> None:
    """`tiles.num_rows` is the number of rows."""
    width, columns, inner = sizes
    weights = pack(kind, width, columns, 1), pack(kind, inner * (2 if gate else 1), width, 2)
    launched = card.launched["fused_byte_rows_kernel"]
    padded = replace(tiles, num_rows=1 if tiles.num_rows == 1 else -(-tiles.num_rows // 8) * 8)
    with mock.patch.object(hopper_tiles, "tile_sizes", return_value=padded):
        check_rows(tiles.num_rows, *weights, sizes, gate, dtype, has_bias=has_bias)
    assert card.launched["fused_byte_rows_kernel"] > launched


@pytest.mark.parametrize("num_rows", [1, 2, 8, 9, 16])
def test_nothing_is_read_or_written_beyond_the_rows_and_outputs(num_rows: int) -> None:
    check_edges(num_rows, pack("int8", 72, 640, 1), hopper_tiles.tile_sizes(num_rows, 72, 1, gated=False, bits=8))


def test_a_row_among_others_has_the_bits_that_it_has_among_fewer() -> None:
    weights = pack("int8", 256, 1152, 1), pack("int8", 160, 256, 2)
    x, residual = (normal(16, size, dtype=torch.bfloat16, device=CPU, seed=size) for size in (1152, 256))
    norm_weight = torch.ones(256, dtype=torch.bfloat16)

    def multiply(rows: slice) -> torch.Tensor:
        return normed_linear(linear_add(x[rows], weights[0], residual[rows], norm_weight), weights[1], EPS, gate="silu")

    together = multiply(slice(None))
    for rows in (slice(3, 5), slice(4, 13)):
        assert_same(multiply(rows), together[rows])


@pytest.mark.parametrize(("kind", "multiply"), [("int8", linear_int8), ("fp8", linear_fp8)])
@pytest.mark.parametrize("num_rows", [1, 7, 16])
def test_a_product_without_a_norm_has_only_a_bias(
    kind: str, multiply: Callable[..., torch.Tensor], num_rows: int, card: EmulatedCard
) -> None:
    weight, bias = pack(kind, 72, 384, 1), normal(72, dtype=torch.bfloat16, device=CPU, seed=2)
    x = padded_rows(normal(num_rows, 384, dtype=torch.bfloat16, device=CPU), 400)
    out, launched = Guarded((num_rows, 72), torch.bfloat16, CPU), card.launched["fused_byte_rows_kernel"]
    multiply(x, weight, bias=bias, out=out.tensor)
    assert_near(out.check(), x.float() @ exact.dequantise(weight).T + bias.float(), "matmul")
    assert card.launched["fused_byte_rows_kernel"] > launched


def test_results_whose_rows_lie_apart_are_written_by_the_tiles(card: EmulatedCard) -> None:
    weight = pack_int8(normal(72, 384, dtype=torch.float32, device=CPU) / 16)
    out = torch.empty(3, 80, dtype=torch.bfloat16)[:, :72]
    x, launched = normal(3, 384, dtype=torch.bfloat16, device=CPU), card.launched["fused_byte_rows_kernel"]
    linear_int8(x, weight, out=out)
    assert_near(out, x.float() @ exact.dequantise(weight).T, "matmul")
    assert card.launched["fused_byte_rows_kernel"] == launched


def test_a_narrow_head_that_these_kernels_multiply_has_no_fused_argmax() -> None:
    """Its product adds in another order: near a tie the two could choose different tokens."""
    assert bind_greedy_head(pack("int8", 64, 256, 1)) is None
