"""Tiles of Hopper's kernels for one row: `fused_byte_row` and `fused_int4_row`. Imports no Gluon."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HopperGemvTiles:
    """`num_warps` warps with a chunk of 128 columns each, and as many outputs as a matrix instruction has rows."""

    num_warps: int
    registers_max: int | None = None  # per thread; None leaves the number to the assembler
    block_n: int = 16


def hopper_gemv_tiles(*, gated: bool) -> HopperGemvTiles:
    """Eight warps if a matrix has few outputs, to keep enough loads in flight. Four for a gated one, whose programs have twice
    as many outputs: then four programs share a multiprocessor, and each works while others begin or end."""
    return HopperGemvTiles(4, registers_max=128) if gated else HopperGemvTiles(8)
