"""Bits, comparison and selection (PTX ISA 9.7.1, 9.7.6 to 9.7.8, 9.7.9 for prmt)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.ptx.block import Block
from tests.support.ptx.operations import instruction
from tests.support.ptx.program import Constant, Instruction, UnknownPtx
from tests.support.ptx.types import RAW, Array

_LOGIC: dict[str, Callable[..., Array]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
}
_RELATIONS: dict[str, Callable[..., Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED_RELATIONS = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


@instruction("and or xor not")
def logic(block: Block, code: Instruction, active: Array) -> None:
    kind = code.type
    if kind.kind == "b":
        operands = [block.read_predicate(operand) for operand in code.operands[1:]]
    else:
        operands = [block.raw(operand, kind.width) for operand in code.operands[1:]]
    block.write(code.operands[0], _LOGIC[code.opcode](*operands), active)


@instruction("shl shr")
def shift(block: Block, code: Instruction, active: Array) -> None:
    """Shifts by the width or more give zeros, or the sign of signed operands."""
    kind, bits = code.type, 8 * code.type.width
    values, distance = block.read(code.operands[1], kind), code.operands[2]
    count = block.raw(distance, 4)
    bounded = np.minimum(count, bits - 1).astype(values.dtype)
    moved = values << bounded if code.opcode == "shl" else values >> bounded
    is_short = isinstance(distance, Constant) and 0 <= distance.bits < bits
    if not is_short and (code.opcode == "shl" or values.dtype.kind == "u"):
        moved = np.where(count < bits, moved, values.dtype.type(0))
    block.write(code.operands[0], kind.pack(moved), active)


@instruction("shf", "l r wrap clamp")
def funnel_shift(block: Block, code: Instruction, active: Array) -> None:
    lower, upper, count = (block.raw(operand, 4).astype(np.uint64) for operand in code.operands[1:4])
    count = count & np.uint64(31) if "wrap" in code.modifiers else np.minimum(count, np.uint64(32))
    both = (upper << np.uint64(32)) | lower
    moved = (both << count) >> np.uint64(32) if "l" in code.modifiers else both >> count
    block.write(code.operands[0], moved.astype(np.uint32), active)


@instruction("bfe")
def extract_field(block: Block, code: Instruction, active: Array) -> None:
    """Bits beyond the operand are its sign if signed, else zeros."""
    kind = code.type
    values = block.read(code.operands[1], kind).astype(np.int64)
    begin, length = (block.raw(operand, 4).astype(np.int64) & 255 for operand in code.operands[2:4])
    if kind.width > 4 or (begin + length > 8 * kind.width).any():
        raise UnknownPtx("a field of 64 bits, or one that ends behind its number")
    field = (values >> begin) & ((1 << length) - 1)
    if kind.kind == "i":
        field = np.where((length > 0) & ((field >> np.maximum(length - 1, 0)) & 1 == 1), field - (1 << length), field)
    block.write(code.operands[0], field.astype(kind.raw), active)


@instruction("bfi")
def insert_field(block: Block, code: Instruction, active: Array) -> None:
    field, values = (block.raw(operand, code.type.width) for operand in code.operands[1:3])
    begin, length = (block.raw(operand, 4).astype(np.uint64) for operand in code.operands[3:5])
    mask = ((np.uint64(1) << length) - np.uint64(1)) << begin
    joined = (values & ~mask) | ((field.astype(np.uint64) << begin) & mask)
    block.write(code.operands[0], joined.astype(code.type.raw), active)


@instruction("popc clz")
def count_bits(block: Block, code: Instruction, active: Array) -> None:
    values = block.raw(code.operands[1], code.type.width)
    bits = np.unpackbits(values.view(np.uint8).reshape(values.size, -1), axis=1, bitorder="little")
    leading_zeros = np.where(bits.any(1), bits[:, ::-1].argmax(1), bits.shape[1])
    found = bits.sum(1) if code.opcode == "popc" else leading_zeros
    block.write(code.operands[0], found.astype(np.uint32), active)


@instruction("lop3")
def three_input_logic(block: Block, code: Instruction, active: Array) -> None:
    """An 8-bit lookup table maps three bits to one."""
    a, b, c = (block.raw(operand, 4) for operand in code.operands[1:4])
    table = int(block.raw(code.operands[4], 4)[0])
    found = np.zeros_like(a)
    for entry in range(8):
        if table >> entry & 1:
            found |= (a if entry & 4 else ~a) & (b if entry & 2 else ~b) & (c if entry & 1 else ~c)
    block.write(code.operands[0], found, active)


@instruction("prmt")
def permute_bytes(block: Block, code: Instruction, active: Array) -> None:
    """Each four bits of the selector choose one of eight bytes or, with the highest bit set, its replicated sign."""
    lower, upper, selector = (block.raw(operand, 4) for operand in code.operands[1:4])
    taken = np.concatenate([lower[:, None].view(np.uint8), upper[:, None].view(np.uint8)], axis=1)
    choices = (selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & np.uint32(15)
    found = np.take_along_axis(taken, (choices & 7).astype(np.int64), axis=1)
    signs = np.where(found & 0x80, np.uint8(0xFF), np.uint8(0))
    chosen = np.ascontiguousarray(np.where(choices & 8, signs, found))
    block.write(code.operands[0], chosen.view(np.uint32)[:, 0], active)


@instruction("setp", "eq ne lt le gt ge equ neu ltu leu gtu geu lo ls hi hs num nan and or xor ftz")
def compare(block: Block, code: Instruction, active: Array) -> None:
    """With NaN, ordered relations are false and unordered ones (`…u`) are true."""
    kind, relation = code.type, code.modifiers[0]
    a, b = (block.read(operand, kind) for operand in code.operands[1:3])
    neither: Any = np.isnan(a) | np.isnan(b) if kind.kind == "f" else np.False_
    if relation in ("num", "nan"):
        holds = neither if relation == "nan" else ~neither
    elif relation in _RELATIONS or relation in _UNSIGNED_RELATIONS:
        holds = _RELATIONS[_UNSIGNED_RELATIONS.get(relation, relation)](a, b) & ~neither
    else:
        holds = _RELATIONS[relation[:-1]](a, b) | neither
    for name in ("and", "or", "xor"):
        if name in code.modifiers:
            holds = _LOGIC[name](holds, block.read_predicate(code.operands[3]))
    block.write(code.operands[0], holds, active)


@instruction("selp")
def select(block: Block, code: Instruction, active: Array) -> None:
    first, second = (block.raw(operand, code.type.width) for operand in code.operands[1:3])
    chosen = np.where(block.read_predicate(code.operands[3]), first, second)
    block.write(code.operands[0], chosen.astype(RAW[code.type.width], copy=False), active)
