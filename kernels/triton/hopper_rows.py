"""Tiles of the kernels that Hopper has for one row: `fused_byte_row` and `fused_int4_row`. Imports no Gluon."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HopperRowTiles:
    """`num_warps` at a chunk of 128 columns each, and outputs as a matrix instruction has rows."""

    num_warps: int
    registers_max: int | None = None  # of a thread; None leaves their number to the assembler
    block_n: int = 16


def hopper_row_tiles(*, gated: bool) -> HopperRowTiles:
    """Eight warps where a matrix has few outputs, so that enough of it is on its way. Four of a gated one, of which a program
    has twice as much: four programs of a multiprocessor, whose beginnings and ends the others fill."""
    return HopperRowTiles(4, registers_max=128) if gated else HopperRowTiles(8)
