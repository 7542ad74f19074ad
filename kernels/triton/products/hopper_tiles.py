"""Tiles of Hopper's kernels for few rows, `fused_byte_rows` and `fused_int4_rows`, and which products they serve."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.operations import FUSED_ROWS_MAX
from kernels.quantised_weights import CHUNK_COLUMNS, Fp8Weight, Int4Weight, Int8Weight
from kernels.triton.launching.card_properties import has_gluon, multiprocessors

OPERAND_ROWS = 8
"""Rows of x that a matrix instruction multiplies: the columns of its right operand."""

HEAD_OUTPUTS_MIN = 32_000
"""From so many outputs on, which output heads have, tiles of 8-bit weights are not split: on an H200 they reached 0.82 of the
bandwidth (docs/adr/0066-few-rows-on-hopper.md), and a kernel that adds in their order fuses the argmax (`greedy_head`)."""


@dataclass(frozen=True, slots=True)
class HopperTiles:
    """`num_warps` warps with a chunk of 128 columns each; `block_n` outputs, a multiple of the 16 of a matrix instruction;
    `num_rows` rows of x: 1, or the real number rounded up to 8 or 16."""

    num_warps: int
    registers_max: int  # per thread
    block_n: int = 16
    num_rows: int = 1


def tile_sizes(num_rows: int, num_outputs: int, multiprocessors: int, *, gated: bool, bits: int) -> HopperTiles:
    """The tiles for weights of `bits` bits.

    Eight warps, to keep enough loads in flight for matrices of few outputs. Four for a gated product, whose programs have twice
    as many outputs: four programs then share a multiprocessor, and some compute while others start or end. The number of warps
    determines the order of sums, so it is the same for any number of rows.

    Every program reads all of x. For more than one row programs therefore have 32 outputs, or 16 of both halves, unless that
    would leave multiprocessors without a program. With 16 rows gated products of 4 bits get more registers, so that only three
    programs share a multiprocessor, and so do other products where each multiprocessor has one program anyway.
    """
    padded = 1 if num_rows == 1 else -(-num_rows // OPERAND_ROWS) * OPERAND_ROWS
    if gated:
        return HopperTiles(4, 168 if padded > OPERAND_ROWS and bits == 4 else 128, num_rows=padded)
    block_n = 32 if padded > 1 and occupies(32, num_outputs, multiprocessors) else 16
    if padded <= OPERAND_ROWS:
        return HopperTiles(8, 80 if block_n == 16 else 128, block_n, padded)
    return HopperTiles(8, 168 if -(-num_outputs // block_n) <= multiprocessors else 128, block_n, padded)


def occupies(block_n: int, num_outputs: int, multiprocessors: int) -> bool:
    """Whether programs of `block_n` outputs occupy at least seven of eight multiprocessors."""
    return 8 * -(-num_outputs // block_n) >= 7 * multiprocessors


def supported_tiles(
    x: torch.Tensor, weight: Int8Weight | Fp8Weight | Int4Weight, num_outputs: int, *, gated: bool = False
) -> HopperTiles | None:
    """The tiles of Hopper's kernels for x: [M, K], or None where another kernel serves it: on other cards, for more rows, rows
    that are not of 16 bits, columns or groups that are not whole chunks, and for 8-bit weights of so few outputs that
    multiprocessors would be left without a program."""
    (num_rows, num_columns), count = x.shape, multiprocessors(x.device)
    if not 1 <= num_rows <= FUSED_ROWS_MAX or x.element_size() != 2 or not has_gluon(x.device):
        return None
    if isinstance(weight, Int4Weight):
        if weight.group_size % CHUNK_COLUMNS:
            return None
    elif num_columns % CHUNK_COLUMNS or not occupies(16, num_outputs, count):
        return None
    return tile_sizes(num_rows, num_outputs, count, gated=gated, bits=weight_bits(weight))


def supported_separate_tiles(
    x: torch.Tensor, weight: Int8Weight | Fp8Weight | Int4Weight, num_outputs: int
) -> HopperTiles | None:
    """As `supported_tiles`, for a product that is not fused with norms: None for a head of 8 bits, too."""
    if not isinstance(weight, Int4Weight) and num_outputs >= HEAD_OUTPUTS_MIN:
        return None
    return supported_tiles(x, weight, num_outputs)


def weight_bits(weight: Int8Weight | Fp8Weight | Int4Weight) -> int:
    """Bits of a weight."""
    return 4 if isinstance(weight, Int4Weight) else 8
