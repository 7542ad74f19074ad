"""Warp-level operations (PTX ISA 9.7.9: shfl; 9.7.13: vote, redux, match, elect, bar.warp)."""

from __future__ import annotations

import numpy as np

from tests.support.ptx.block import WARP, Block
from tests.support.ptx.memory import Fault
from tests.support.ptx.operations import instruction
from tests.support.ptx.program import Constant, Instruction, UnknownPtx
from tests.support.ptx.types import Array

_REDUCTIONS = {
    "add": np.add, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


@instruction("shfl", "sync bfly idx up down")
def shuffle(block: Block, code: Instruction, active: Array) -> None:
    """Each thread reads another lane's value, or its own if that lane is outside the warp."""
    target, source, distance, clamp, _ = code.operands
    mode = code.modifiers[1]
    block.active_warps(active)
    if clamp != Constant(0 if mode == "up" else WARP - 1):
        raise UnknownPtx("parts of a warp")
    offsets, lanes = block.raw(distance, 4).astype(np.int64), block.lanes
    lane = {"bfly": lanes ^ offsets, "idx": offsets % WARP, "up": lanes - offsets, "down": lanes + offsets}[mode]
    lane = np.where((lane >= 0) & (lane < WARP), lane, lanes)
    block.write(target, block.raw(source, 4)[block.warps * WARP + lane], active)


@instruction("redux", "sync add min max and or xor")
def reduce(block: Block, code: Instruction, active: Array) -> None:
    block.active_warps(active)
    values = block.read(code.operands[1], code.type).reshape(-1, WARP)
    made = _REDUCTIONS[code.modifiers[1]].reduce(values, axis=1, dtype=values.dtype)
    block.write(code.operands[0], code.type.pack(np.repeat(made, WARP)), active)


@instruction("vote", "sync any all ballot")
def vote(block: Block, code: Instruction, active: Array) -> None:
    block.active_warps(active)
    predicates = block.read_predicate(code.operands[1]).reshape(-1, WARP)
    if "ballot" in code.modifiers:
        ballot = np.packbits(predicates, axis=1, bitorder="little").view(np.uint32)[:, 0]
        return block.write(code.operands[0], np.repeat(ballot, WARP), active)
    return block.write(
        code.operands[0], np.repeat(predicates.any(1) if "any" in code.modifiers else predicates.all(1), WARP), active
    )


@instruction("bar", "warp sync")
def wait_for_warp(block: Block, code: Instruction, active: Array) -> None:
    """Threads of a warp execute in lockstep here, but accesses within a warp are only ordered by this barrier."""
    block.shared.pass_warp_barrier(np.flatnonzero(block.active_warps(active)))


@instruction("trap")
def trap(block: Block, code: Instruction, active: Array) -> None:
    """A kernel detected an error (PTX ISA 9.7.19)."""
    raise Fault("trap")
