"""Checks Hopper's machine code: no instruction overwrites registers that products in flight still read.

A `wgmma` whose left operand is in registers reads them until it is waited for. PTX expresses this by its waits only, and does
not show how the assembler reuses registers meanwhile. The assembler of CUDA 12.9 reused some too early, and results were wrong
(fixed in 13.3; triton-lang/triton, pull request 11781). Triton 3.6 ships that of 12.8 for Hopper.
"""

from __future__ import annotations

import re

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*([^;]*);", re.M)
_OPERAND = re.compile(r"\bR(\d+)\b")
OPERAND_REGISTERS = 4
"""Per thread: 64 rows and 32 bytes of columns for 128 threads."""


def overwritten_operands(sass: str) -> int:
    """The number of instructions that write a register which a product in flight still reads. A backward branch with products
    in flight is followed once, and then not taken."""
    code = [
        (int(address, 16), opcode, [part.strip() for part in rest.split(",")]) for address, opcode, rest in _instructions(sass)
    ]
    indices = {address: index for index, (address, _, _) in enumerate(code)}
    overwriting: set[int] = set()
    followed: set[int] = set()
    groups: list[set[int]] = []  # registers read by each committed group of products
    uncommitted: set[int] = set()  # registers read by products that are not committed yet
    index = 0
    while index < len(code):
        address, opcode, operands = code[index]
        index += 1
        if opcode.startswith(("HGMMA", "QGMMA")):
            uncommitted |= _registers_read(operands)
            if operands[-1] == "gsb0":
                groups, uncommitted = [*groups, uncommitted], set()
        elif opcode == "WARPGROUP.DEPBAR.LE":
            groups = groups[max(0, len(groups) - int(operands[1], 16)) :]
        elif opcode.startswith("BRA") and groups and address not in followed:
            followed.add(address)
            target = int(operands[-1].split()[-1], 16)
            index = indices.get(target, index) if target <= address else index
        elif _written_registers(opcode, operands) & uncommitted.union(*groups):
            overwriting.add(address)
    return len(overwriting)


def _instructions(sass: str) -> list[tuple[str, str, str]]:
    return _INSTRUCTION.findall(sass)


def _registers_read(operands: list[str]) -> set[int]:
    """Registers of the left operand, unless it is a shared memory descriptor; the first operand is the accumulator."""
    left = _OPERAND.match(operands[1])
    return set() if left is None else _registers(left, OPERAND_REGISTERS)


def _written_registers(opcode: str, operands: list[str]) -> set[int]:
    """Registers of the result, the first operand, or the one after a predicate; the first operand of a store is an address."""
    first = operands[1] if len(operands) > 1 and re.fullmatch(r"P[0-9T]", operands[0]) else operands[0]
    destination = _OPERAND.match(first)
    if destination is None:
        return set()
    if opcode.endswith(".128") or ".128." in opcode or opcode.endswith("88.4"):
        return _registers(destination, 4)
    is_wide = ".64" in opcode or "WIDE" in opcode or opcode == "CS2R" or opcode.endswith("88.2")
    return _registers(destination, 2 if is_wide else 1)


def _registers(first: re.Match[str], count: int) -> set[int]:
    number = int(first[1])
    return set(range(number, number + count))
