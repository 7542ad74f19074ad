"""Execution of one thread block: registers, scheduling, branches and barriers (PTX ISA 6, operands; 9.7.12 and 9.7.13).

Threads that execute together form a crew: the whole block (`LOCKSTEP`, the fastest), or each warp separately up to the next
barrier, in order (`FORWARD`) or in reverse order (`REVERSE`). Within a crew, threads at the lowest instruction run first, so
that branches reconverge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tests.support.ptx.memory import Fault, GlobalMemory, SharedMemory
from tests.support.ptx.program import (
    Address,
    Constant,
    Instruction,
    Operand,
    Program,
    Register,
    Special,
    Symbol,
    Vector,
)
from tests.support.ptx.types import DTYPES, NUMBERS, POISON, RAW, Array, Type

if TYPE_CHECKING:
    from tests.support.ptx.copies import Copies
    from tests.support.ptx.warpgroups import Products

LOCKSTEP, FORWARD, REVERSE = "lockstep", "forward", "reverse"
WARP = 32
ENDS = ("ret", "exit")
Action = Callable[["Block", Instruction, Array], None]


@dataclass(frozen=True)
class Launch:
    """`arguments`: a number for each parameter of the program. `early`: memory must not be accessed before griddepcontrol.wait.
    `adds_waits`: wait for a product whose result is read too early, instead of raising Fault."""

    program: Program
    actions: list[Action | None]
    arguments: list[int | float]
    memory: GlobalMemory
    grid: tuple[int, int, int]
    shared_bytes: int
    early: bool = False
    adds_waits: bool = False


@dataclass
class Block:
    launch: Launch
    place: tuple[int, int, int]
    order: str = LOCKSTEP
    registers: dict[str, Array] = field(default_factory=dict)
    copies: dict[int, Copies] = field(default_factory=dict)  # by crew
    products: dict[int, Products] = field(default_factory=dict)
    crew: int = 0

    def __post_init__(self) -> None:
        self.shared = SharedMemory(self.launch.shared_bytes)
        self.num_threads = self.launch.program.num_threads
        self.everyone = np.ones(self.num_threads, bool)
        self.threads = np.arange(self.num_threads)
        self.lanes, self.warps = self.threads % WARP, self.threads // WARP
        self.members = self.everyone  # of the crew that runs
        self.waited = np.full(self.num_threads, not self.launch.early)
        self.stored = np.zeros(self.num_threads, bool)  # in global memory since the last barrier
        self._constants: dict[tuple[int, int], Array] = {}

    def run(self) -> None:
        """Run all threads to their end. Raises Fault."""
        crews = [self._run_crew(number, members) for number, members in enumerate(self._crews())]
        while crews:
            stops = {next(crew, None) for crew in crews}
            if len(stops) > 1:
                raise Fault(f"{self.launch.program.name}: the warps of a block wait at different barriers, or some have ended")
            if stops == {None}:
                break
            self.shared.pass_barrier()
            self.stored[:] = False
        if not self.waited.all():
            raise Fault(f"{self.launch.program.name} was launched early and never waits")

    def _crews(self) -> list[Array]:
        if self.order == LOCKSTEP:
            return [self.everyone]
        warps = [self.warps == warp for warp in range(self.num_threads // WARP)]
        return warps if self.order == FORWARD else warps[::-1]

    def _run_crew(self, crew: int, members: Array) -> Iterator[int]:
        """Run one crew; yield the instruction of each barrier that it reaches."""
        program, actions = self.launch.program, self.launch.actions
        parked = {0: members}  # threads by the instruction at which they continue
        while parked:
            place = min(parked)
            active = parked.pop(place)
            self.crew, self.members = crew, members
            others = min(parked, default=-1)
            while place != others and (action := actions[place]) is not None:
                self._perform(action, program.instructions[place], active)
                place += 1
            if place == others:  # they reconverge
                self._park(parked, place, active)
                continue
            code = program.instructions[place]
            taken = active if code.guard is None else active & self.read_predicate(code.guard)
            if code.opcode == "bra":
                assert isinstance(code.operands[0], Symbol)
                self._branch(parked, program.labels[code.operands[0].name], taken)
                self._branch(parked, place + 1, active & ~taken)
            elif code.opcode in ENDS:
                self._branch(parked, place + 1, active & ~taken)
            else:
                if parked or not np.array_equal(taken, members):
                    raise Fault(f"{program.name}: not all threads come to {code.text}")
                yield place
                self._park(parked, place + 1, active)

    def _park(self, parked: dict[int, Array], place: int, threads: Array) -> None:
        there = parked.get(place)
        parked[place] = threads if there is None else self._canonical_mask(there | threads)

    def _branch(self, parked: dict[int, Array], place: int, threads: Array) -> None:
        if threads.any():
            self._park(parked, place, self._canonical_mask(threads))

    def _canonical_mask(self, threads: Array) -> Array:
        """Return the object `everyone` for a full mask, which avoids a selection at each instruction."""
        return self.everyone if threads.all() else threads

    def _perform(self, action: Action, code: Instruction, active: Array) -> None:
        if code.guard is not None:
            active = self._canonical_mask(active & self.read_predicate(code.guard))
            if active is not self.everyone and not active.any():
                return
        try:
            action(self, code, active)
        except Fault as fault:
            raise Fault(f"{self.launch.program.name}, block {self.place}: {code.text}: {fault}") from fault
        except Exception as error:
            error.add_note(f"in {self.launch.program.name}: {code.text}")
            raise

    def check_waited(self, active: Array) -> None:
        """Raises Fault if the preceding kernel may still run, so that memory must not be accessed."""
        if self.launch.early and not self.waited[active].all():
            raise Fault("memory is touched before griddepcontrol.wait")

    def read(self, operand: Operand, kind: Type) -> Array:
        """Operand values: [T], or [2, T] of a packed type."""
        return kind.unpack(self.raw(operand, kind.width))

    def raw(self, operand: Operand, width: int) -> Array:
        """[T] raw bits. A register must have the width of the instruction."""
        if isinstance(operand, Register):
            bits = self.registers.get(operand.name)
            if bits is None:
                bits = self._unwritten(operand)
            if operand.width != width:
                raise Fault(f"{operand.name} has {8 * operand.width} bits, {8 * width} are read")
            return bits
        key = (id(operand), width)  # operands live as long as the program
        known = self._constants.get(key)
        if known is None:
            known = self._constants[key] = self._constant(operand, width)
        return known

    def raw_as(self, operand: Operand, width: int) -> Array:
        """`raw`, or the lower bits of a wider register, as read by `st` and `cvt` (PTX ISA 9.4.1)."""
        if isinstance(operand, Register) and operand.width > width:
            return self.raw(operand, operand.width).astype(RAW[width])
        return self.raw(operand, width)

    def read_predicate(self, operand: Operand) -> Array:
        """[T] bool."""
        if isinstance(operand, Constant):
            return np.full(self.num_threads, operand.bits != 0)
        assert isinstance(operand, Register), operand
        held = self.registers.get(operand.name)
        if held is None:
            raise Fault(f"{operand.name} is read before it is written")
        return ~held if operand.negated else held

    def write(self, operand: Operand, bits: Array, active: Array) -> None:
        """bits: [T] raw, of the register's width; only active threads write."""
        if not isinstance(operand, Register):
            assert operand == Symbol("_"), operand
            return
        for products in self.products.values():
            products.check_written(operand.name)
        if bits.dtype != DTYPES[operand.width]:
            raise Fault(f"{bits.dtype} is written to {operand.name} of {operand.width} bytes")
        if active is not self.everyone:
            before = self.registers.get(operand.name)
            bits = np.where(active, bits, self._poison(operand) if before is None else before)
        self.registers[operand.name] = bits

    def write_wider(self, operand: Operand, values: Array, active: Array) -> None:
        """Integers [T], sign- or zero-extended to a possibly wider register, as written by `ld` and `cvt`."""
        if isinstance(operand, Register) and operand.width > values.dtype.itemsize:
            values = values.astype(NUMBERS[values.dtype.kind, operand.width])
        self.write(operand, values.view(RAW[values.dtype.itemsize]), active)

    def addresses(self, operand: Operand, active: Array) -> Array:
        """[n] int64, of active threads."""
        assert isinstance(operand, Address), operand
        width = operand.base.width if isinstance(operand.base, Register) else 8
        base = self.raw(operand.base, width)
        return self.select_active(base, active).astype(np.int64) + operand.offset

    def select_active(self, values: Array, active: Array) -> Array:
        """[T, …] → [n, …], of active threads."""
        return values if active is self.everyone else values[active]

    def active_warps(self, active: Array) -> Array:
        """[W] bool: the active warps. Raises Fault if only a part of a warp is active."""
        warps = active.reshape(-1, WARP)
        if (warps.any(1) != warps.all(1)).any():
            raise Fault("a part of a warp comes to what a whole warp must do together")
        every: Array = warps[:, 0]
        return every

    def _unwritten(self, operand: Register) -> Array:
        products = self.products.get(self.crew)
        if products is None or operand.name not in products.accumulators:
            return self._poison(operand)
        if not self.launch.adds_waits:
            raise Fault(f"{operand.name} is read while wgmma is still writing it")
        products.wait_all(self)
        return self.registers[operand.name]

    def _poison(self, operand: Register) -> Array:
        filled = np.full(self.num_threads * max(1, operand.width), POISON, np.uint8)
        return filled.view(RAW[operand.width]) if operand.width else np.zeros(self.num_threads, bool)

    def _constant(self, operand: Operand, width: int) -> Array:
        if isinstance(operand, Constant):
            return np.full(self.num_threads, operand.bits & ((1 << 8 * width) - 1), RAW[width])
        assert isinstance(operand, Special), operand
        return self._special(operand.name).astype(RAW[width])

    def _special(self, name: str) -> Array:
        """Value of a special register; blocks of these kernels are one-dimensional."""
        register, _, axis = name.lstrip("%").partition(".")
        number = "xyz".index(axis or "x")
        if register == "tid":
            return self.threads if number == 0 else np.zeros(self.num_threads)
        if register == "laneid":
            return self.lanes
        if register == "warpid":
            return self.warps
        of_all = {"ctaid": self.place, "nctaid": self.launch.grid, "ntid": (self.num_threads, 1, 1)}[register]
        return np.full(self.num_threads, of_all[number])


def parts_of(operand: Operand) -> tuple[Operand, ...]:
    """The parts of a vector; any other operand is its only part."""
    return operand.parts if isinstance(operand, Vector) else (operand,)
