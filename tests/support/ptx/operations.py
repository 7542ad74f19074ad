"""The registry of instructions: modules register theirs, and programs with any other instruction are rejected."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.ptx.block import ENDS, Action
from tests.support.ptx.program import Instruction, Program, UnknownPtx
from tests.support.ptx.types import TYPES

_ACTIONS: dict[str, Action] = {}
_MODIFIERS: dict[str, frozenset[str]] = {}
_BARRIERS = {("bar", "sync"), ("barrier", "sync"), ("barrier", "sync", "aligned")}


def instruction(opcodes: str, modifiers: str = "") -> Callable[[Action], Action]:
    """Register the action of `opcodes`, with any of `modifiers` and types; both are separated by spaces."""

    def enter(action: Action) -> Action:
        for opcode in opcodes.split():
            _ACTIONS[opcode] = action
            _MODIFIERS[opcode] = frozenset(modifiers.split()) | TYPES.keys()
        return action

    return enter


def actions_of(program: Program) -> list[Action | None]:
    """The action of each instruction; None for branches, ends and barriers, which the block handles. Raises UnknownPtx."""
    return [_action_of(code, program.name) for code in program.instructions]


def _action_of(code: Instruction, kernel: str) -> Action | None:
    name = (code.opcode, *code.modifiers)
    if code.opcode in ENDS or name in {("bra",), ("bra", "uni")}:
        return None
    if name in _BARRIERS:
        if [getattr(operand, "bits", None) for operand in code.operands] != [0]:
            raise UnknownPtx(f"{kernel}: {code.text}: only barrier 0 of all threads is known")
        return None
    action = _ACTIONS.get(code.opcode)
    if action is None:
        raise UnknownPtx(f"{kernel}: the instruction {code.opcode} in: {code.text}")
    unknown = [modifier for modifier in code.modifiers if modifier not in _MODIFIERS[code.opcode]]
    if unknown:
        raise UnknownPtx(f"{kernel}: .{unknown[0]} of {code.opcode} in: {code.text}")
    return action
