"""Integer and floating-point arithmetic (PTX ISA 9.7.1, 9.7.3 to 9.7.5).

Narrow floats are computed in float32 and rounded once, which equals the instruction for a single sum or product. Fused
multiply-add is computed in float64. Approximations (`.approx`, `.full`) have float32 accuracy; a card may differ by a unit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.ptx.block import Block
from tests.support.ptx.operations import instruction
from tests.support.ptx.program import Instruction
from tests.support.ptx.types import Array, Type

ROUNDING = "rn approx full ftz NaN"
_TINY = np.float32(2.0**-126)


def _flushed(values: Array) -> Array:
    """Flush subnormal numbers to zero (`.ftz`)."""
    return np.where(np.abs(values) < _TINY, np.copysign(np.float32(0), values), values)


def _operands(block: Block, code: Instruction, first: int = 1) -> list[Array]:
    read = [block.read(operand, code.type) for operand in code.operands[first:]]
    return [_flushed(values) for values in read] if "ftz" in code.modifiers else read


def _write(block: Block, code: Instruction, values: Array, active: Array, kind: Type | None = None) -> None:
    if "ftz" in code.modifiers:
        values = _flushed(values)
    block.write(code.operands[0], (kind or code.type).pack(values), active)


def _fused(a: Array, b: Array, c: Array) -> Array:
    if a.dtype.kind != "f":
        return a * b + c
    return (a.astype(np.float64) * b + c).astype(a.dtype)


def _quotient(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return a / b
    divisor = np.where(b == 0, 1, b).astype(a.dtype)
    whole: Array = (a - np.fmod(a, divisor)) // divisor
    return whole


def _remainder(a: Array, b: Array) -> Array:
    left: Array = np.fmod(a, np.where(b == 0, 1, b).astype(a.dtype))
    return left


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "div": _quotient,
    "rem": _remainder,
    "neg": np.negative,
    "abs": np.abs,
    "fma": _fused,
    "ex2": np.exp2,
    "lg2": np.log2,
    "sqrt": np.sqrt,
    "rcp": lambda a: (1 / a).astype(a.dtype),
    "rsqrt": lambda a: (1 / np.sqrt(a.astype(np.float64))).astype(a.dtype),
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
}


@instruction("add sub div rem neg abs fma ex2 lg2 sqrt rcp rsqrt tanh sin cos", ROUNDING)
def compute(block: Block, code: Instruction, active: Array) -> None:
    _write(block, code, FUNCTIONS[code.opcode](*_operands(block, code)), active)


@instruction("min max", "NaN ftz xorsign abs")
def minimum_or_maximum(block: Block, code: Instruction, active: Array) -> None:
    """Without `.NaN`, the operand that is a number wins over NaN. `.xorsign.abs` compares magnitudes; the result is negative if
    one of the operands is."""
    a, b = _operands(block, code)
    smaller, larger = (np.minimum, np.maximum) if "NaN" in code.modifiers or a.dtype.kind != "f" else (np.fmin, np.fmax)
    choose = smaller if code.opcode == "min" else larger
    if "xorsign" in code.modifiers:
        _write(block, code, np.copysign(choose(np.abs(a), np.abs(b)), np.where(np.signbit(a) != np.signbit(b), -1, 1)), active)
    else:
        _write(block, code, choose(a, b), active)


@instruction("mul mad", "lo hi wide rn ftz")
def multiply(block: Block, code: Instruction, active: Array) -> None:
    """Integer products keep the lower half, the upper half, or all bits."""
    kind, width = code.type, code.type.width
    a, b = (block.read(operand, kind) for operand in code.operands[1:3])
    if kind.kind == "f":
        return _write(block, code, np.multiply(*_operands(block, code)), active)
    wide = np.dtype(f"{kind.kind}{2 * width}") if width < 8 else np.dtype(object)
    if "wide" in code.modifiers:
        product = a.astype(wide) * b.astype(wide)
        if code.opcode == "mad":
            product += block.raw(code.operands[3], 2 * width).view(wide)
        return block.write(code.operands[0], product.view(f"u{2 * width}"), active)
    if "hi" in code.modifiers:
        upper = (a.astype(wide) * b.astype(wide)) >> (8 * width)
        product = (upper & ((1 << 8 * width) - 1)).astype(kind.raw) if width == 8 else upper.astype(kind.raw)
    else:
        product = (a * b).view(kind.raw)
    if code.opcode == "mad":
        product = product + block.raw(code.operands[3], width)
    return block.write(code.operands[0], product, active)
