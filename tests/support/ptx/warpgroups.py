"""Asynchronous products of four warps from shared memory (PTX ISA 9.7.15, asynchronous warpgroup level instructions).

From `mma_async` until the `wait_group` of its group, reading an accumulator is a fault, and so is storing where the product
reads. Matrices are laid out in shared memory as in 9.7.15.5: in units of 8 rows whose 16-byte chunks are permuted by address
bits (the swizzle), described by a 64-bit descriptor.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field

import numpy as np

from tests.support.ptx.block import Block, parts_of
from tests.support.ptx.matrices import a_operand, pack_accumulators, unpack_accumulators
from tests.support.ptx.memory import Fault
from tests.support.ptx.operations import instruction
from tests.support.ptx.program import Constant, Instruction, Operand, Register, UnknownPtx, Vector
from tests.support.ptx.types import MATRIX_WIDENED, Array

_SHAPE = re.compile(r"m64n(\d+)k\d+$")
_SHAPES = " ".join(f"m64n{columns}k{depth}" for columns in range(8, 257, 8) for depth in (16, 32))
_ROW_BYTES = {0: 16, 1: 128, 2: 64, 3: 32}  # bytes of a row of a unit, by swizzle mode
_SWIZZLE_MASKS = {0: 0, 1: 7, 2: 3, 3: 1}  # number of 16-byte chunks that are permuted, less one
DEPTH_BYTES = 32  # along the summed dimension, per instruction


@dataclass
class Group:
    """The granules and registers that products read, and the registers that they write."""

    granules: list[Array] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)


@dataclass
class Products:
    """Pending products of one crew: their results by register name, and their groups, the last still open."""

    accumulators: dict[str, tuple[Register, Array, Array]] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=lambda: [Group()])

    @property
    def uncommitted(self) -> Group:
        return self.groups[-1]

    def commit(self) -> None:
        self.groups.append(Group())

    def wait(self, block: Block, num_pending: int) -> None:
        """Complete groups until `num_pending` remain; an accumulator is written once no later product adds to it."""
        while len(self.groups) - 1 > num_pending:
            group = self.groups.pop(0)
            for granules in group.granules:
                block.shared.end_product(granules)
            for name in group.written.difference(*(later.written for later in self.groups)):
                block.write(*self.accumulators.pop(name))

    def wait_all(self, block: Block) -> None:
        self.commit()
        self.wait(block, 0)

    def check_written(self, name: str) -> None:
        """Raises Fault for a register that pending products read or write."""
        if name in self.accumulators or any(name in group.sources for group in self.groups):
            raise Fault(f"{name} is written while wgmma is still using it")


@dataclass(frozen=True)
class Descriptor:
    """Address of a matrix, and bytes between units along the contiguous dimension (leading) and across it (stride)."""

    begin: int
    leading: int
    stride: int
    mode: int

    @classmethod
    def read(cls, bits: int) -> Descriptor:
        if (bits >> 49) & 7:
            raise UnknownPtx("a unit that begins in the middle of its pattern")
        begin, leading, stride = (((bits >> place) & 0x3FFF) << 4 for place in (0, 16, 32))
        return cls(begin, leading, stride, bits >> 62)

    def addresses(self, rows: Array, depth: int, width: int, *, transposed: bool) -> Array:
        """[rows, depth] int64, of elements of `width` bytes. rows: the dimension that is not summed, contiguous if the matrix
        is transposed."""
        span = _ROW_BYTES[self.mode]
        row, column = rows[:, None], np.arange(depth)[None, :]
        if transposed:
            each = span // width
            place = (row // each) * self.leading + (column // 8) * self.stride + (column % 8) * span + (row % each) * width
        else:
            offset = column * width
            place = (row // 8) * self.stride + (row % 8) * span + (offset // span) * self.leading + offset % span
        place = place + self.begin
        exchanged: Array = place ^ (((place >> 7) & _SWIZZLE_MASKS[self.mode]) << 4)
        return exchanged


@functools.cache
def _places(bits: int, first_row: int, num_rows: int, depth: int, width: int, transposed: bool) -> Array:
    return Descriptor.read(bits).addresses(first_row + np.arange(num_rows), depth, width, transposed=transposed)


@instruction("wgmma", f"fence commit_group wait_group mma_async sync aligned e4m3 {_SHAPES}")
def warpgroup(block: Block, code: Instruction, active: Array) -> None:
    products = block.products.setdefault(block.crew, Products())
    if "commit_group" in code.modifiers:
        products.commit()
    elif "wait_group" in code.modifiers:
        products.wait(block, int(block.raw(code.operands[0], 4)[0]))
    elif "mma_async" in code.modifiers:
        _multiply(block, products, code, active)


def _multiply(block: Block, products: Products, code: Instruction, active: Array) -> None:
    """D = A · B + D, or A · B depending on a predicate; A in registers or shared memory, B in shared memory."""
    block.active_warps(active)
    target, a, b, accumulates, *options = code.operands
    shape = _SHAPE.match(next(name for name in code.modifiers if _SHAPE.match(name)))
    assert shape is not None
    if code.modifiers[-2] != code.modifiers[-1] or options[:2] != [Constant(1), Constant(1)]:
        raise UnknownPtx(code.text)
    transposed = [option != Constant(0) for option in options[2:]]
    width, _ = MATRIX_WIDENED[code.modifiers[-1]]
    depth = DEPTH_BYTES // width
    of_a, of_b = transposed if len(transposed) == 2 else (False, *(transposed or [False]))
    reader = _Reader(block, products, active, code.modifiers[-1], depth)
    if isinstance(a, Vector):
        rows = a_operand(block, a.parts, code.modifiers[-1])
        products.uncommitted.sources |= {part.name for part in a.parts if isinstance(part, Register)}
    else:
        rows = reader.rows_of_warps(a, transposed=of_a)
    product = np.matmul(rows.astype(np.float64), reader.columns(b, int(shape[1]), transposed=of_b))
    registers = parts_of(target)
    before = unpack_accumulators([_pending_accumulator(block, products, register) for register in registers])
    is_accumulated = block.read_predicate(accumulates).reshape(-1, 32)[:, :1, None]
    for register, bits in zip(registers, pack_accumulators(np.where(is_accumulated, before, 0) + product), strict=True):
        assert isinstance(register, Register)
        block.registers.pop(register.name, None)
        products.accumulators[register.name] = (register, bits, active)
        products.uncommitted.written.add(register.name)


def _pending_accumulator(block: Block, products: Products, register: Operand) -> Array:
    """Value of an accumulator for the next product: products of a crew are summed in order."""
    assert isinstance(register, Register)
    held = products.accumulators.get(register.name)
    return block.raw(register, 4) if held is None else held[1]


@dataclass
class _Reader:
    """Reads the shared-memory operands of one instruction."""

    block: Block
    products: Products
    active: Array
    kind: str
    depth: int

    def rows_of_warps(self, operand: Operand, *, transposed: bool) -> Array:
        """[W, 16, depth]: warp w of four has rows 16w to 16w + 15 of the 64."""
        descriptors = self.block.raw(operand, 8).reshape(-1, 32)[:, 0]
        made = np.zeros((descriptors.size, 16, self.depth), np.float32)
        for warp in np.flatnonzero(self.block.active_warps(self.active)):
            rows = (warp % 4) * 16 + np.arange(16)
            made[warp] = self._matrix(int(descriptors[warp]), rows, np.array([warp]), transposed=transposed)
        return made

    def columns(self, operand: Operand, count: int, *, transposed: bool) -> Array:
        """[W, depth, count]."""
        descriptors = self.block.raw(operand, 8).reshape(-1, 32)[:, 0]
        made = np.zeros((descriptors.size, self.depth, count), np.float32)
        active = self.block.active_warps(self.active)
        for bits in set(descriptors[active].tolist()):
            warps = np.flatnonzero(active & (descriptors == bits))
            matrix = self._matrix(bits, np.arange(count), warps, transposed=transposed)
            made[warps] = matrix.T
        return made

    def _matrix(self, bits: int, rows: Array, warps: Array, *, transposed: bool) -> Array:
        width, widen = MATRIX_WIDENED[self.kind]
        places = _places(bits, int(rows[0]), len(rows), self.depth, width, transposed)
        raw, granules = self.block.shared.begin_product(places.reshape(-1), width, warps)
        self.products.uncommitted.granules.append(granules)
        return widen(raw).reshape(places.shape)
