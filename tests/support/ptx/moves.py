"""Data movement between registers and memory (PTX ISA 9.7.9: mov, ld, st, prefetch, createpolicy; 9.7.13.5: atom)."""

from __future__ import annotations

import numpy as np

from tests.support.ptx.block import Block, parts_of
from tests.support.ptx.memory import Fault
from tests.support.ptx.operations import instruction
from tests.support.ptx.program import Instruction, Symbol, UnknownPtx, Vector
from tests.support.ptx.types import NUMBERS, RAW, Array

CACHES = "L1 L2 ca cg cs wt nc v2 v4 v8"
READ_EARLY = ("L1::evict_first", "L1::evict_last")
"""Cache policies by which a kernel marks inputs that no preceding kernel writes: `kernels.triton.launching.early_launch`."""
ORDERS = "volatile weak relaxed acquire release acq_rel gpu sys cta"
RELEASES = {"release", "acq_rel"}


@instruction("mov")
def move(block: Block, code: Instruction, active: Array) -> None:
    target, source = code.operands
    width = code.type.width
    if code.type.kind == "b":
        return block.write(target, block.read_predicate(source), active)
    if isinstance(source, Vector):
        parts = [block.raw(part, width // len(source.parts)) for part in source.parts]
        return block.write(target, np.stack(parts, axis=1).view(RAW[width])[:, 0], active)
    if not isinstance(target, Vector):
        return block.write(target, block.raw(source, width), active)
    pieces = block.raw(source, width)[:, None].view(RAW[width // len(target.parts)])
    for number, part in enumerate(target.parts):
        block.write(part, np.ascontiguousarray(pieces[:, number]), active)
    return None


@instruction("ld", f"param global shared const {CACHES} {ORDERS}")
def load(block: Block, code: Instruction, active: Array) -> None:
    kind, space = code.type, code.modifiers
    if "param" in space:
        return _load_parameter(block, code, active)
    targets, addresses = parts_of(code.operands[0]), block.addresses(code.operands[1], active)
    if "shared" in space:
        found = block.shared.load(addresses, kind.width, len(targets), block.select_active(block.threads, active))
    elif "global" in space:
        if any(policy in code.text for policy in READ_EARLY):
            if block.launch.early and not block.waited[active].all():
                block.launch.memory.check_visible(addresses, kind.width * len(targets))
        else:
            block.check_waited(active)
        found = block.launch.memory.load(addresses, kind.width, len(targets))
    else:
        raise UnknownPtx("another space of addresses")
    for number, target in enumerate(targets):
        values = np.empty(block.num_threads, kind.raw)  # inactive threads write nothing
        values[... if active is block.everyone else active] = found[:, number]
        block.write_wider(target, values.view(NUMBERS[kind.kind, kind.width]), active)
    return None


def _load_parameter(block: Block, code: Instruction, active: Array) -> None:
    symbol = code.operands[1].base  # type: ignore[union-attr]
    assert isinstance(symbol, Symbol), code.text
    program = block.launch.program
    place = program.place_of_parameter(symbol.name)
    value, kind = block.launch.arguments[place], code.type
    if program.parameters[place].kind == "f":
        bits = np.array([value], program.parameters[place].name.replace("f", "float"))
    else:
        bits = np.array([int(value) & ((1 << 8 * kind.width) - 1)], kind.raw)
    values = np.repeat(bits.view(kind.raw), block.num_threads)
    block.write_wider(code.operands[0], values.view(NUMBERS[kind.kind, kind.width]), active)


@instruction("st", f"global shared {CACHES} {ORDERS}")
def store(block: Block, code: Instruction, active: Array) -> None:
    addresses = block.addresses(code.operands[0], active)
    sources = parts_of(code.operands[1])
    values = np.stack([block.select_active(block.raw_as(part, code.type.width), active) for part in sources], axis=1)
    if "shared" in code.modifiers:
        block.shared.store(addresses, values, block.select_active(block.threads, active))
    elif "global" in code.modifiers:
        block.check_waited(active)
        block.launch.memory.store(addresses, values)
        block.stored |= active
    else:
        raise UnknownPtx("another space of addresses")


@instruction("prefetch", "global L2")
def prefetch(block: Block, code: Instruction, active: Array) -> None:
    """Check the address only. Allowed before the wait for the preceding kernel."""
    block.launch.memory.check(block.addresses(code.operands[0], active), 1, 1)


@instruction("createpolicy", "fractional L2")
def create_policy(block: Block, code: Instruction, active: Array) -> None:
    """A cache hint, without effect here."""
    block.write(code.operands[0], np.zeros(block.num_threads, np.uint64), active)


_ATOMIC = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}


@instruction("atom red", f"global add min max exch and or cas {ORDERS}")
def atomic(block: Block, code: Instruction, active: Array) -> None:
    """Executed thread by thread."""
    kind, has_result = code.type, code.opcode == "atom"
    address, *sources = code.operands[1:] if has_result else code.operands
    block.check_waited(active)
    if RELEASES.intersection(code.modifiers):
        _check_released(block, active)
    memory, addresses = block.launch.memory, block.addresses(address, active)
    values = [block.raw(source, kind.width)[active] for source in sources]
    before = np.zeros(block.num_threads, kind.raw)
    for number, thread in enumerate(np.flatnonzero(active)):
        place = addresses[number : number + 1]
        old = memory.load(place, kind.width, 1)
        before[thread] = old[0, 0]
        given = [value[number : number + 1, None] for value in values]
        memory.store(place, _atomic_result(code, old, given))
    if has_result:
        block.write(code.operands[0], before, active)


def _atomic_result(code: Instruction, old: Array, given: list[Array]) -> Array:
    """The new value in memory. All are [1, 1] raw."""
    if "cas" in code.modifiers:
        return np.where(old == given[0], given[1], old)
    if "exch" in code.modifiers:
        return given[0]
    function = next(_ATOMIC[name] for name in code.modifiers if name in _ATOMIC)
    unpack, pack = code.type.unpack, code.type.pack
    made: Array = pack(np.asarray(function(unpack(old), unpack(given[0]))))
    return made


def _check_released(block: Block, active: Array) -> None:
    """A thread's release covers its own stores, and those of other threads that a barrier orders before it (PTX ISA 8.9)."""
    if np.isin(block.warps[block.stored], block.warps[active], invert=True).any():
        raise Fault("releases what another warp stored, without a barrier in between")
