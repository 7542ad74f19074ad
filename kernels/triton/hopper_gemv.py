"""Tiles of Hopper's GEMV kernels, `fused_byte_row` and `fused_int4_row`. Imports no Gluon."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HopperGemvTiles:
    """`num_warps` warps with a chunk of 128 columns each; `block_n` outputs, the rows of a matrix instruction."""

    num_warps: int
    registers_max: int | None = None  # per thread; None leaves the choice to the assembler
    block_n: int = 16


def hopper_gemv_tiles(*, gated: bool) -> HopperGemvTiles:
    """Eight warps by default, to keep enough loads in flight for matrices of few outputs. Four for a gated product, whose
    programs have twice as many outputs: four programs then share a multiprocessor, and some compute while others start or
    end."""
    return HopperGemvTiles(4, registers_max=128) if gated else HopperGemvTiles(8)
