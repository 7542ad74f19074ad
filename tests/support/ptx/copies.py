"""Asynchronous copies, fences, and kernels that start before their predecessor has ended (PTX ISA 9.7.9.25: cp.async; 9.7.13:
membar, fence, griddepcontrol).

A copy reads and writes at its `wait_group`, as late as is possible on a card; until then no access to its target is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tests.support.ptx.block import Block
from tests.support.ptx.operations import instruction
from tests.support.ptx.program import Instruction, UnknownPtx
from tests.support.ptx.types import Array


@dataclass(frozen=True)
class Copy:
    """sources: [n] in global memory where `is_filled` [n], zeros elsewhere; targets: [n] in shared memory."""

    sources: Array
    is_filled: Array
    targets: Array
    size: int
    threads: Array
    granules: Array

    def arrive(self, block: Block) -> None:
        values = np.zeros((self.sources.size, self.size), np.uint8)
        values[self.is_filled] = block.launch.memory.load(self.sources[self.is_filled], 4, self.size // 4).view(np.uint8)
        block.shared.end_copy(self.targets, self.granules, values, self.threads)


@dataclass
class Copies:
    """Copies of one crew: those since the last commit, and the committed groups."""

    uncommitted: list[Copy] = field(default_factory=list)
    groups: list[list[Copy]] = field(default_factory=list)


@instruction("cp", "async ca cg shared global L2 commit_group wait_group wait_all")
def copy(block: Block, code: Instruction, active: Array) -> None:
    """All threads of a crew must commit and wait together."""
    copies = block.copies.setdefault(block.crew, Copies())
    if "shared" in code.modifiers:
        return copies.uncommitted.append(_begin_copy(block, code, active))
    if not np.array_equal(active, block.members):
        raise UnknownPtx("threads that wait for copies by themselves")
    if "commit_group" in code.modifiers or "wait_all" in code.modifiers:
        copies.groups.append(copies.uncommitted)
        copies.uncommitted = []
    if "commit_group" not in code.modifiers:
        left = int(block.raw(code.operands[0], 4)[0]) if code.operands else 0
        while len(copies.groups) > left:
            for each in copies.groups.pop(0):
                each.arrive(block)
    return None


def _begin_copy(block: Block, code: Instruction, active: Array) -> Copy:
    """An operand after the size is the number of bytes to read: all, or none for a target filled with zeros."""
    block.check_waited(active)
    target, source, size = code.operands[:3]
    length = int(block.raw(size, 4)[0])
    counted = block.raw(code.operands[3] if len(code.operands) > 3 else size, 4)[active]
    if not ((counted == 0) | (counted == length)).all():
        raise UnknownPtx("copies of which a part counts")
    targets, sources, threads = block.addresses(target, active), block.addresses(source, active), block.threads[active]
    block.launch.memory.check(sources[counted > 0], length, length)
    return Copy(sources, counted > 0, targets, length, threads, block.shared.begin_copy(targets, length, threads))


@instruction("fence membar", "proxy async shared acq_rel sc gpu sys cta gl")
def fence(block: Block, code: Instruction, active: Array) -> None:
    """Blocks run one after another, so each sees the stores of those before it; wgmma may read what precedes a proxy fence."""
    if "proxy" in code.modifiers:
        block.shared.fence_proxies()


@instruction("griddepcontrol", "wait launch_dependents")
def depend(block: Block, code: Instruction, active: Array) -> None:
    """`launch_dependents` has no effect here, because dependents wait for themselves."""
    if "wait" in code.modifiers:
        block.waited |= active
