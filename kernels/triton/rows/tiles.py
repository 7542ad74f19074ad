"""Tile sizes of kernels that hold whole rows in registers, chosen by the row's width alone.

They do not depend on the number of rows, so that a row is summed in the same order in every batch.
"""

from __future__ import annotations

from typing import NamedTuple

from kernels.triton.launching.card_properties import power_of_two

ELEMENTS_THREAD = 16
"""Two loads of 16 bytes in flight per thread and tensor: enough to cover memory latency with eight programs per multiprocessor,
and few enough for the registers of eight programs."""
WARPS_MIN, WARPS_MAX = 4, 16


class RowTile(NamedTuple):
    """`rows` rows of `block` columns, a power of two, computed by `num_warps` warps."""

    rows: int
    block: int
    num_warps: int


def row_tile(width: int) -> RowTile:
    """One row per program from 1,025 columns on, several if rows are narrower."""
    block = power_of_two(width)
    rows = max(1, WARPS_MIN * 32 * ELEMENTS_THREAD // block)
    return RowTile(rows, block, min(WARPS_MAX, max(WARPS_MIN, block // (32 * ELEMENTS_THREAD))))
