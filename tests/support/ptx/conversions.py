"""Type conversions (PTX ISA 9.7.9, cvt)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.support.ptx.block import Block
from tests.support.ptx.operations import instruction
from tests.support.ptx.program import Instruction, UnknownPtx
from tests.support.ptx.types import TYPES, Array, join_halves, round_bf16, round_e4m3, round_f16

_TO_INTEGERS: dict[str, Callable[[Array], Array]] = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}
_PACKED: dict[str, Callable[[Array], Array]] = {"f16x2": round_f16, "bf16x2": round_bf16, "e4m3x2": round_e4m3}


@instruction("cvt", "rn rzi rni rmi rpi satfinite ftz")
def convert(block: Block, code: Instruction, active: Array) -> None:
    target, source = (TYPES[name] for name in code.modifiers[-2:])
    if target.name == "e4m3x2" and "satfinite" not in code.modifiers:
        raise UnknownPtx("e4m3 without .satfinite")
    if target.name in _PACKED and source.name == "f32":  # two registers are packed into one; the first is the upper half
        upper, lower = (_PACKED[target.name](block.read(operand, source)) for operand in code.operands[1:3])
        return block.write(code.operands[0], join_halves(lower, upper), active)
    values = source.unpack(block.raw_as(code.operands[1], source.width))
    if target.kind == "f":
        return block.write(code.operands[0], target.pack(values), active)
    return block.write_wider(code.operands[0], _as_integers(values, code, np.dtype(f"{target.kind}{target.width}")), active)


def _as_integers(values: Array, code: Instruction, wanted: np.dtype[np.generic]) -> Array:
    """Floats saturate at the limits of the integer type and NaN becomes 0; integers keep their lower bits."""
    if values.dtype.kind != "f":
        return values.astype(wanted)
    whole = next(_TO_INTEGERS[name] for name in code.modifiers if name in _TO_INTEGERS)(values.astype(np.float64))
    limits = np.iinfo(wanted.name)
    inside = np.clip(np.where(np.isnan(values), 0, whole), float(limits.min), float(limits.max))
    at_end = inside >= float(limits.max)  # the limit as a float may be one too large
    return np.where(at_end, limits.max, np.where(at_end, 0, inside).astype(wanted)).astype(wanted)
