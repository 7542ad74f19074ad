"""A check on Hopper's machine code: products in flight keep the registers that they read.

A `wgmma` whose left operand is in registers reads them until it is waited for. PTX expresses this by its waits only, and does
not show how the assembler reuses registers meanwhile. That of CUDA 12.9 reused some too early, and results were wrong (fixed in
13.3; triton-lang/triton, pull request 11781). Triton 3.6 brings that of 12.8 for Hopper.
"""

from __future__ import annotations

import re

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*([^;]*);", re.M)
_OPERAND = re.compile(r"\bR(\d+)\b")
OPERAND_REGISTERS = 4
"""Per thread: 64 rows and 32 bytes of columns for 128 threads."""


def overwritten_operands(sass: str) -> int:
    """How many instructions write a register that a product in flight still reads. A loop that is left or repeated with
    products in flight is followed both ways."""
    code = [(int(address, 16), opcode, [part.strip() for part in rest.split(",")]) for address, opcode, rest in _found(sass)]
    places = {address: place for place, (address, _, _) in enumerate(code)}
    wrong: set[int] = set()
    followed: set[int] = set()
    groups: list[set[int]] = []  # registers read by each committed group of products, and
    begun: set[int] = set()  # by products that are not committed yet
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
    """Registers of the left operand, unless it is a descriptor of shared memory; the first operand is the sum."""
    left = _OPERAND.match(operands[1])
    return set() if left is None else _registers(left, OPERAND_REGISTERS)


def _written(opcode: str, operands: list[str]) -> set[int]:
    """Registers of the result, which comes first, or after a predicate; in a store, an address comes first."""
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
