"""The tiles of Llama-3.1-8B's products, as numbers: they were chosen for an H200.

They follow from shapes, the card and estimated costs. Another number of splits adds sums in another order, and so changes
their bits.
"""

from __future__ import annotations

import pytest

from kernels.triton.products.fused_int4 import fused_int4_tiles
from kernels.triton.products.fused_linear import FusedTiles, fused_tiles
from kernels.triton.products.fused_row import GemvTiles, gemv_tiles
from kernels.triton.products.int4 import Int4Tiles, int4_tiles
from kernels.triton.products.linear import skinny_tiles
from kernels.triton.products.tiles import Tiles, byte_tiles

H200, L40S = (90, 132), (89, 142)
QKV, OUTPUT, DOWN, HEAD = (6144, 4096), (4096, 4096), (4096, 14_336), (128_256, 4096)
GATE_UP = (14_336, 4096)


@pytest.mark.parametrize(
    ("shape", "bits_16", "bits_8", "bits_4"), [(QKV, 2, 4, 8), (OUTPUT, 4, 4, 8), (DOWN, 4, 4, 8), (HEAD, 1, 1, 1)]
)
def test_columns_of_a_product_are_split_alike_for_any_few_rows(
    shape: tuple[int, int], bits_16: int, bits_8: int, bits_4: int
) -> None:
    assert skinny_tiles(*shape, *H200).splits == bits_16
    for num_rows in (1, 64):
        assert byte_tiles(num_rows, shape, *H200).splits == bits_8
        assert int4_tiles(num_rows, *shape, *H200).splits == bits_4


def test_tiles_of_few_rows_on_an_h200() -> None:
    assert skinny_tiles(*QKV, *H200) == Tiles(16, 64, 128, num_warps=4, num_stages=6, splits=2)
    assert skinny_tiles(*HEAD, *H200) == Tiles(16, 128, 128, num_warps=4, num_stages=3)
    assert byte_tiles(1, QKV, *H200) == Tiles(16, 64, 128, num_warps=4, num_stages=6, splits=4)
    assert byte_tiles(64, QKV, *H200) == Tiles(64, 64, 128, num_warps=4, num_stages=4, splits=4)
    assert int4_tiles(1, *QKV, *H200) == Int4Tiles(16, 128, num_warps=4, num_stages=6, splits=8)
    assert int4_tiles(64, *QKV, *H200) == Int4Tiles(64, 128, num_warps=4, num_stages=4, splits=8)


def test_tiles_of_rows_of_32_bits_on_an_h200() -> None:
    assert skinny_tiles(*OUTPUT, *H200, 4) == Tiles(16, 64, 128, num_warps=4, num_stages=3, splits=4)
    assert byte_tiles(16, OUTPUT, *H200, row_bytes=4) == Tiles(16, 32, 64, num_warps=4, num_stages=4, splits=2)
    assert byte_tiles(17, OUTPUT, *H200, row_bytes=4) == Tiles(32, 64, 32, num_warps=4, num_stages=2, splits=4)


def test_a_product_of_more_tiles_than_there_are_counters_of_arrivals_is_not_split() -> None:
    head = 272_960, 8192  # 4,265 tiles for one tile of rows, 8,530 for two
    assert [byte_tiles(num_rows, head, *L40S, row_bytes=4).splits for num_rows in (32, 33)] == [2, 1]


def test_tiles_of_many_rows_are_not_split_and_are_smaller_on_older_cards() -> None:
    assert byte_tiles(65, OUTPUT, *H200) == Tiles(128, 128, 64, num_warps=8, num_stages=4)
    assert byte_tiles(65, OUTPUT, *L40S) == Tiles(128, 128, 64, num_warps=8, num_stages=3)
    assert int4_tiles(65, *OUTPUT, *H200) == Int4Tiles(128, 128, num_warps=8, num_stages=3)
    assert int4_tiles(65, *OUTPUT, *L40S) == Int4Tiles(64, 128, num_warps=8, num_stages=3)


def test_cards_with_less_shared_memory_have_fewer_loads_in_flight() -> None:
    assert [int4_tiles(num_rows, *OUTPUT, *L40S).num_stages for num_rows in (1, 64)] == [4, 3]
    assert skinny_tiles(*OUTPUT, *L40S).num_stages == 4
    assert fused_tiles(*OUTPUT, *L40S, gated=False).num_stages == 3


@pytest.mark.parametrize("shape", [QKV, OUTPUT, DOWN])
def test_tiles_of_products_fused_with_norms_on_an_h200(shape: tuple[int, int]) -> None:
    assert fused_tiles(*shape, *H200, gated=False) == FusedTiles(16, 32, 256, 4, 4, 1, column_warps=4)
    assert fused_tiles(*shape, *H200, gated=False, weight_bytes=1) == FusedTiles(16, 64, 128, 4, 6, 4, column_warps=1)
    assert fused_int4_tiles(*shape, H200[1], gated=False) == Int4Tiles(16, 128, num_warps=4, num_stages=4, splits=8)


def test_tiles_of_gated_products_have_half_the_outputs_of_both_matrices() -> None:
    assert fused_tiles(*GATE_UP, *H200, gated=True) == FusedTiles(16, 32, 256, 4, 3, 1, column_warps=4)
    assert fused_tiles(*GATE_UP, *H200, gated=True, weight_bytes=1) == FusedTiles(16, 64, 128, 4, 4, 1, column_warps=1)
    assert fused_int4_tiles(*GATE_UP, H200[1], gated=True) == Int4Tiles(16, 64, num_warps=4, num_stages=4)


@pytest.mark.parametrize(
    ("gated", "has_squares_out", "weight_bytes", "tiles"),
    [
        (True, False, 2, GemvTiles(2, 2048, num_warps=8)),
        (True, False, 1, GemvTiles(2, 2048)),
        (False, True, 2, GemvTiles(4, 1024)),
        (False, True, 1, GemvTiles(4, 1024)),
        (False, False, 2, GemvTiles(2, 2048)),
        (False, False, 1, GemvTiles(16, 512, num_warps=8)),
    ],
)
def test_the_tiles_of_a_single_row_were_the_fastest_on_an_h200(
    gated: bool, has_squares_out: bool, weight_bytes: int, tiles: GemvTiles
) -> None:
    for num_columns in (2048, 4096):
        found = gemv_tiles(num_columns, gated=gated, has_squares_out=has_squares_out, weight_bytes=weight_bytes)
        assert found == tiles


def test_steps_of_a_single_row_are_no_longer_than_the_row() -> None:
    assert gemv_tiles(1000, gated=True, has_squares_out=False, weight_bytes=2) == GemvTiles(2, 1024)
