"""Which products Hopper's kernels for few rows serve, and with which tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from kernels.alternatives import PRODUCTS, TILES, alternative_in_force
from kernels.quantised_weights import Int8Weight, pack_fp8, pack_int4, pack_int8
from kernels.triton.products import fused_linear, hopper_rows, hopper_tiles
from kernels.triton.products.hopper_rows import multiply_few_rows
from kernels.triton.products.hopper_tiles import (
    HEAD_OUTPUTS_MIN,
    HopperTiles,
    supported_separate_tiles,
    supported_tiles,
    tile_sizes,
    weight_bits,
)

ENOUGH = 1920
"""Outputs of which programs of 16 occupy seven of eight of an H200's multiprocessors."""


@pytest.fixture(autouse=True)
def card() -> Iterator[mock.Mock]:
    """An H200; `has_gluon` can be changed."""
    with (
        mock.patch.object(hopper_tiles, "has_gluon", return_value=True) as has_gluon,
        mock.patch.object(hopper_tiles, "multiprocessors", return_value=132),
    ):
        yield has_gluon


def row_of(count: int, columns: int = 256, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(count, columns, dtype=dtype)


@pytest.mark.parametrize(("num_rows", "padded"), [(1, 1), (2, 8), (8, 8), (9, 16), (16, 16)])
def test_rows_are_padded_to_8_or_16_but_a_single_one(num_rows: int, padded: int) -> None:
    weight = pack_int8(torch.ones(ENOUGH, 256))
    tiles = supported_tiles(row_of(num_rows), weight, ENOUGH)
    assert tiles is not None
    assert tiles.num_rows == padded


def test_programs_have_32_outputs_where_multiprocessors_are_not_left_without_one() -> None:
    def block_n(num_outputs: int, num_rows: int) -> int:
        return tile_sizes(num_rows, num_outputs, 132, gated=False, bits=8).block_n

    assert [block_n(4096, rows) for rows in (1, 8, 16)] == [16, 32, 32]
    assert [block_n(3000, rows) for rows in (1, 8, 16)] == [16, 16, 16]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_sums_have_the_same_order_for_any_number_of_rows(gated: bool, bits: int) -> None:
    warps = {tile_sizes(rows, 4096, 132, gated=gated, bits=bits).num_warps for rows in range(1, 17)}
    assert len(warps) == 1


def test_17_rows_and_rows_of_other_widths_have_other_kernels() -> None:
    weight = pack_int8(torch.ones(ENOUGH, 256))
    for x in (row_of(0), row_of(17), row_of(2, dtype=torch.float32), row_of(2).to(torch.float8_e4m3fn)):
        assert supported_tiles(x, weight, ENOUGH) is None


def test_other_cards_have_other_kernels(card: mock.Mock) -> None:
    card.return_value = False
    assert supported_tiles(row_of(2), pack_int8(torch.ones(ENOUGH, 256)), ENOUGH) is None


def test_weights_of_8_bits_need_whole_chunks_and_enough_outputs() -> None:
    assert supported_tiles(row_of(2, 240), pack_fp8(torch.ones(ENOUGH, 240)), ENOUGH) is None
    assert supported_tiles(row_of(2), pack_fp8(torch.ones(ENOUGH - 80, 256)), ENOUGH - 80) is None


def test_heads_of_8_bits_keep_the_tiles_whose_order_their_fused_argmax_has() -> None:
    assert supported_separate_tiles(row_of(2, 128), pack_int8(torch.ones(HEAD_OUTPUTS_MIN, 128)), HEAD_OUTPUTS_MIN) is None
    weight = pack_int8(torch.ones(ENOUGH, 128))
    assert supported_separate_tiles(row_of(2, 128), weight, ENOUGH) == supported_tiles(row_of(2, 128), weight, ENOUGH)


def test_weights_of_4_bits_need_groups_of_whole_chunks_alone() -> None:
    assert supported_tiles(row_of(2), pack_int4(torch.ones(48, 256), 64), 48) is None
    assert supported_tiles(row_of(2, 240), pack_int4(torch.ones(48, 240), 128), 48) == HopperTiles(8, 80, 16, 8)


@pytest.mark.parametrize("pack", [pack_int8, pack_int4], ids=["int8", "int4"])
@pytest.mark.parametrize("num_rows", [1, 2, 9])
def test_products_are_tiled_where_that_was_decided(pack: Callable[[torch.Tensor], Any], num_rows: int) -> None:
    weight, x = pack(torch.ones(ENOUGH, 256)), row_of(num_rows)
    bits, limit = weight_bits(weight), {1: 1, 2: 8, 9: 16}[num_rows]

    def fused() -> bool:
        tiles = fused_linear.choose_tiles(x, weight, ENOUGH, gated=False, has_squares_out=False)
        return isinstance(tiles, HopperTiles)

    def separate() -> bool:
        with mock.patch.object(hopper_rows, "launch"):
            return multiply_few_rows(x, weight, None, torch.empty(num_rows, ENOUGH, dtype=x.dtype))

    with (
        mock.patch.object(fused_linear, "capability", return_value=90),
        mock.patch.object(fused_linear, "multiprocessors", return_value=132),
    ):
        assert (fused(), separate()) == (True, True)
        with alternative_in_force(PRODUCTS[bits, limit], TILES):
            assert (fused(), separate()) == (False, False)


def test_rows_that_are_not_contiguous_are_refused() -> None:
    x = torch.zeros(256, 2, dtype=torch.bfloat16).T
    with pytest.raises(AssertionError, match="rows of x are contiguous"):
        multiply_few_rows(x, pack_int8(torch.ones(ENOUGH, 256)), None, torch.empty(2, ENOUGH, dtype=x.dtype))


def test_weights_that_are_not_contiguous_are_refused() -> None:
    whole = pack_int8(torch.ones(ENOUGH, 512))
    part = Int8Weight(whole.values[:, :256], whole.scales)
    with pytest.raises(AssertionError, match="the weight is contiguous"):
        multiply_few_rows(row_of(2), part, None, torch.empty(2, ENOUGH, dtype=torch.bfloat16))
