"""Parses the text of one kernel into instructions and operands (PTX ISA 4, syntax; 6, operands; 11.2, kernel entry points)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from tests.support.ptx.types import TYPES, Type

SHARED_SYMBOL = "global_smem"  # Triton's name for the shared memory of a launch; its address is 0


class UnknownPtx(Exception):
    """An instruction, modifier or syntax unknown to the emulator, which ignores nothing."""


@dataclass(frozen=True)
class Register:
    """`width` in bytes, 0 for a predicate."""

    name: str
    width: int
    negated: bool = False


@dataclass(frozen=True)
class Constant:
    """`bits` as written, for any operand width; negative integers stay negative."""

    bits: int


@dataclass(frozen=True)
class Special:
    """A special register that identifies a thread: %tid.x, %ctaid.y, %laneid …"""

    name: str


@dataclass(frozen=True)
class Address:
    base: Operand
    offset: int


@dataclass(frozen=True)
class Vector:
    parts: tuple[Operand, ...]


@dataclass(frozen=True)
class Symbol:
    """A label, a parameter, or `_` for a discarded result."""

    name: str


Operand = Register | Constant | Special | Address | Vector | Symbol


@dataclass(frozen=True)
class Instruction:
    """`guard`: the predicate of participating threads. `modifiers`: everything after the first dot."""

    text: str
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None = None

    @cached_property
    def type(self) -> Type:
        """Type of result and operands: the last modifier."""
        return TYPES[self.modifiers[-1]]

    @property
    def vector_size(self) -> int:
        return next((int(name[1:]) for name in self.modifiers if name in ("v2", "v4", "v8")), 1)


@dataclass
class Program:
    """One kernel. `parameters`: types of a launch's arguments, in order; `labels`: instruction indices of branch targets."""

    name: str
    parameters: list[Type]
    num_threads: int
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def place_of_parameter(self, name: str) -> int:
        return int(name.removeprefix(f"{self.name}_param_"))


_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\(([^)]*)\)([^{]*)\{", re.DOTALL)
_LINE_DIRECTIVES = re.compile(r"^\s*\.loc\b[^\n]*$", re.MULTILINE)
_DECLARED = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)
_LABEL = re.compile(r"(\$[\w$]+)\s*:")
_GUARDED = re.compile(r"@(!?)(%?\w+)\s+")
_OPERANDS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s{}\[\]|][^,{}\[\]|]*")
_ADDRESS = re.compile(r"(\S+?)\s*(?:\+\s*(-?\w+))?$")
_INTEGER = re.compile(r"-?(?:0x[0-9A-Fa-f]+|\d+)U?$")
_FLOAT = re.compile(r"0[fFdD]([0-9A-Fa-f]+)$")
_DECIMAL = re.compile(r"\d+\.\d+$")
_SPECIAL = re.compile(r"%(?:n?tid|n?ctaid)\.[xyz]$|%laneid$|%warpid$")


def parse_program(ptx: str) -> Program:
    """Parse the only kernel of a module. Raises UnknownPtx."""
    text = re.sub(r"//[^\n]*", "", ptx)
    entry = _ENTRY.search(text)
    if entry is None:
        raise UnknownPtx("there is no .entry")
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", entry[3])
    if threads is None:
        raise UnknownPtx(f"{entry[1]} does not say how many threads it has")
    parameters = [TYPES[kind] for kind in re.findall(r"\.param\s+\.(\w+)", entry[2])]
    program = Program(entry[1], parameters, int(threads[1]))
    reader = _Reader(program)
    for statement in _LINE_DIRECTIVES.sub("", _body(text, entry.end())).split(";"):
        reader.read(statement.strip())
    return program


def _body(text: str, begin: int) -> str:
    """The text up to the brace that matches the one before `begin`."""
    depth = 1
    for place in re.finditer(r"[{}]", text[begin:]):
        depth += 1 if place[0] == "{" else -1
        if depth == 0:
            return text[begin : begin + place.start()]
    raise UnknownPtx("a brace is not closed")


class _Reader:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._widths: dict[str, int] = {}  # by a register's name, or its name without the number
        self._operands: dict[str, Operand] = {}  # by their text, as most recur

    def read(self, statement: str) -> None:
        while label := _LABEL.match(statement):
            self._program.labels[label[1]] = len(self._program.instructions)
            statement = statement[label.end() :].strip()
        if statement[:1] in ("{", "}"):  # a scope of declarations
            return self.read(statement[1:].strip())
        if declared := _DECLARED.match(statement):
            return self._declare(declared[1], declared[2])
        if statement and not statement.startswith(".pragma"):
            self._program.instructions.append(self._instruction(statement))
        return None

    def _declare(self, kind: str, names: str) -> None:
        width = 0 if kind == "pred" else TYPES[kind].width
        for name in re.findall(r"[%\w$]+(?=\s*(?:<\d+>)?\s*(?:,|$))", names):
            if self._widths.setdefault(name, width) != width:
                raise UnknownPtx(f"{name} is declared with two widths")

    def _instruction(self, statement: str) -> Instruction:
        guard = None
        text = " ".join(statement.split())
        if guarded := _GUARDED.match(text):
            guard = Register(guarded[2], 0, negated=bool(guarded[1]))
            text = text[guarded.end() :]
        name, _, rest = text.partition(" ")
        opcode, *modifiers = name.split(".")
        if not opcode:
            raise UnknownPtx(statement)
        try:
            operands = tuple([self._cached_operand(part.strip()) for part in _OPERANDS.findall(rest)])
        except UnknownPtx as error:
            raise UnknownPtx(f"{self._program.name}: {error} in: {statement}") from error
        return Instruction(statement, opcode, tuple(part.split("::")[0] for part in modifiers), operands, guard)

    def _cached_operand(self, text: str) -> Operand:
        known = self._operands.get(text)
        if known is None:
            known = self._operands[text] = self._operand(text)
        return known

    def _operand(self, text: str) -> Operand:
        if text[0] == "{":
            return Vector(tuple(self._cached_operand(part) for part in _parts(text[1:-1])))
        if text[0] == "[":
            return self._address(text)
        if number := _FLOAT.match(text):
            return Constant(int(number[1], 16))
        if _DECIMAL.match(text):  # the fraction of createpolicy, the only decimal operand
            return Constant(int(np.float32(text).view(np.uint32)))
        if _INTEGER.match(text):
            return Constant(int(text.rstrip("U"), 0))
        if _SPECIAL.match(text):
            return Special(text)
        if text == SHARED_SYMBOL:
            return Constant(0)
        name = text.removeprefix("!")
        width = self._widths.get(name, self._widths.get(name.rstrip("0123456789")))
        if width is not None:
            return Register(name, width, negated=name != text)
        if text == "_" or text.startswith(("$", f"{self._program.name}_param_")):
            return Symbol(text)
        raise UnknownPtx(f"the operand {text}")

    def _address(self, text: str) -> Address:
        parts = _ADDRESS.match(text[1:-1].strip())
        if parts is None:
            raise UnknownPtx(f"the operand {text}")
        return Address(self._operand(parts[1]), int(parts[2] or "0", 0))


def _parts(text: str) -> Iterator[str]:
    return (part.strip() for part in text.split(","))
