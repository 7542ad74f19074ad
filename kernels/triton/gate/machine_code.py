"""What is read off Hopper's machine code beyond numbers: whether products under way keep the registers that they read.

A `wgmma` whose left operand lies in registers reads them until it is waited for. PTX says so by its waits, and no reader of PTX
sees which registers the assembler gives to whom meanwhile: that of CUDA 12.9 gave some away too early, and results were wrong
(fixed in 13.3; triton-lang/triton, pull request 11781). Triton 3.6 brings that of 12.8 for Hopper.
"""

from __future__ import annotations

import re

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*([^;]*);", re.M)
_OPERAND = re.compile(r"\bR(\d+)\b")
OPERAND_REGISTERS = 4
"""Of a thread: 64 rows and 32 bytes of columns for 128 threads."""


def overwritten_operands(sass: str) -> int:
    """How many instructions write a register that a product under way still reads. A loop that is left or repeated with
    products under way is looked at both ways."""
    code = [(int(address, 16), opcode, [part.strip() for part in rest.split(",")]) for address, opcode, rest in _found(sass)]
    places = {address: place for place, (address, _, _) in enumerate(code)}
    wrong: set[int] = set()
    followed: set[int] = set()
    groups: list[set[int]] = []  # what those read that were committed, and
    begun: set[int] = set()  # those that were not yet
    place = 0
    while place < len(code):
        address, opcode, operands = code[place]
        place += 1
        if opcode.startswith(("HGMMA", "QGMMA")):
            begun |= _read_by_product(operands)
            if operands[-1] == "gsb0":
                groups, begun = [*groups, begun], set()
        elif opcode == "WARPGROUP.DEPBAR.LE":
            groups = groups[max(0, len(groups) - int(operands[1], 16)) :]
        elif opcode.startswith("BRA") and groups and address not in followed:
            followed.add(address)
            target = int(operands[-1].split()[-1], 16)
            place = places.get(target, place) if target <= address else place
        elif _written(opcode, operands) & begun.union(*groups):
            wrong.add(address)
    return len(wrong)


def _found(sass: str) -> list[tuple[str, str, str]]:
    return _INSTRUCTION.findall(sass)


def _read_by_product(operands: list[str]) -> set[int]:
    """Of the left operand, where it is no descriptor of shared memory; the first one is the sum."""
    left = _OPERAND.match(operands[1])
    return set() if left is None else _registers(left, OPERAND_REGISTERS)


def _written(opcode: str, operands: list[str]) -> set[int]:
    """A result comes first, or behind a predicate; a store begins with an address."""
    first = operands[1] if len(operands) > 1 and re.fullmatch(r"P[0-9T]", operands[0]) else operands[0]
    result = _OPERAND.match(first)
    if result is None:
        return set()
    if opcode.endswith(".128") or ".128." in opcode or opcode.endswith("88.4"):
        return _registers(result, 4)
    is_wide = ".64" in opcode or "WIDE" in opcode or opcode == "CS2R" or opcode.endswith("88.2")
    return _registers(result, 2 if is_wide else 1)


def _registers(first: re.Match[str], count: int) -> set[int]:
    number = int(first[1])
    return set(range(number, number + count))
