"""Matrix fragments in the registers of a warp (PTX ISA 9.7.14.5: mma with .m16n8k16 and .m16n8k32, ldmatrix, stmatrix).

Lane l of a warp is in group g = l / 4, at position t = l % 4. In a 16 x 8 accumulator it holds rows g and g + 8, columns 2t and
2t + 1; a register of an operand holds 4 bytes that are consecutive along the summed dimension.
"""

from __future__ import annotations

import numpy as np

from tests.support.ptx.block import WARP, Block, parts_of
from tests.support.ptx.memory import Fault
from tests.support.ptx.operations import instruction
from tests.support.ptx.program import Instruction, Operand, UnknownPtx
from tests.support.ptx.types import MATRIX_WIDENED, RAW, TYPES, Array

ROW_BYTES = 16  # of the 8 x 8 matrices that ldmatrix moves


def elements(block: Block, registers: tuple[Operand, ...], kind: str) -> Array:
    """[registers, W, 32, e] float32: the elements of each register of each lane."""
    width, widen = MATRIX_WIDENED[kind]
    raw = np.stack([block.raw(register, 4) for register in registers])
    return widen(raw.reshape(len(registers), -1, WARP, 1).view(RAW[width]))


def a_operand(block: Block, registers: tuple[Operand, ...], kind: str) -> Array:
    """Operand A: [W, 16, k] from four registers: rows g and g + 8 of the first half of the columns, then of the second."""
    held = elements(block, registers, kind)
    warps, each = held.shape[1], held.shape[-1]
    halves = held.reshape(2, 2, warps, 8, 4, each)  # of the columns, of the rows
    return halves.transpose(2, 1, 3, 0, 4, 5).reshape(warps, 16, 8 * each)


def b_operand(block: Block, registers: tuple[Operand, ...], kind: str) -> Array:
    """Operand B: [W, k, 8] from two registers: column g of the first half of the rows, then of the second."""
    held = elements(block, registers, kind)
    warps, each = held.shape[1], held.shape[-1]
    halves = held.reshape(2, warps, 8, 4, each)  # of the rows
    return halves.transpose(1, 0, 3, 4, 2).reshape(warps, 8 * each, 8)


def unpack_accumulators(raws: list[Array]) -> Array:
    """[W, 16, 2n] float32 from the registers of n / 2 tiles of 8 columns, each [T] raw."""
    values = np.stack(raws).view(np.float32).reshape(-1, 2, 2, raws[0].size // WARP, 8, 4)
    return np.ascontiguousarray(values.transpose(3, 1, 4, 0, 5, 2)).reshape(raws[0].size // WARP, 16, -1)


def pack_accumulators(matrix: Array) -> Array:
    """The reverse of `unpack_accumulators`: [W, 16, c] float32 → [c / 2, T] raw."""
    warps = matrix.shape[0]
    values = matrix.reshape(warps, 2, 8, -1, 4, 2).transpose(3, 1, 5, 0, 2, 4)
    return np.ascontiguousarray(values, np.float32).view(np.uint32).reshape(-1, warps * WARP)


@instruction("mma", "sync aligned m16n8k16 m16n8k32 row col e4m3")
def multiply(block: Block, code: Instruction, active: Array) -> None:
    """D = A · B + C, summed in float64 and rounded to float32; the order of summation on a card is unspecified."""
    result, kinds, addend = code.modifiers[-4], code.modifiers[-3:-1], code.modifiers[-1]
    if (result, addend) != ("f32", "f32") or kinds[0] != kinds[1]:
        raise UnknownPtx(code.text)
    block.active_warps(active)
    targets, a, b, c = (parts_of(operand) for operand in code.operands)
    product = a_operand(block, a, kinds[0]).astype(np.float64) @ b_operand(block, b, kinds[1])
    summed = unpack_accumulators([block.raw(register, TYPES["f32"].width) for register in c]) + product
    for target, bits in zip(targets, pack_accumulators(summed), strict=True):
        block.write(target, bits, active)


@instruction("ldmatrix stmatrix", "sync aligned m8n8 x1 x2 x4 trans shared")
def move_matrices(block: Block, code: Instruction, active: Array) -> None:
    """Lanes 8i to 8i + 7 give the row addresses of matrix i; lane l holds two elements of row l / 4 (with .trans: column)."""
    block.active_warps(active)
    is_load = code.opcode == "ldmatrix"
    operand, address = code.operands if is_load else code.operands[::-1]
    registers = parts_of(operand)
    named = np.flatnonzero(active & (block.lanes < 8 * len(registers)))
    rows = np.zeros(block.num_threads, np.int64)
    rows[active] = block.addresses(address, active)
    warps = active.sum() // WARP
    if is_load:
        found = block.shared.load(rows[named], 2, 8, block.threads[named]).reshape(warps, len(registers), 8, 8)
        if "trans" in code.modifiers:
            found = found.swapaxes(2, 3)
        pairs = np.ascontiguousarray(found).view(np.uint32).reshape(warps, len(registers), WARP)
        for number, register in enumerate(registers):
            bits = np.zeros(block.num_threads, np.uint32)
            bits[active] = pairs[:, number].reshape(-1)
            block.write(register, bits, active)
        return
    held = np.stack([block.raw(register, 4)[active].reshape(-1, WARP) for register in registers], axis=1)
    matrices = np.ascontiguousarray(held).view(np.uint16).reshape(warps, len(registers), 8, 8)
    if "trans" in code.modifiers:
        matrices = matrices.swapaxes(2, 3)
    if (rows[named] % ROW_BYTES).any():
        raise Fault("misaligned rows of a matrix")
    block.shared.store(rows[named], np.ascontiguousarray(matrices).reshape(-1, 8), block.threads[named])
