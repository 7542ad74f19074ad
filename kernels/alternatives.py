"""Kernels that do the same work in decode steps of few rows, and which of them serves. Imports no compiler.

A launcher asks its `Choice` for each launch. An engine on a GPU serves by the oldest alternatives until it has timed all with
the steps of its model, and then by the fastest (`engine.runner.kernel_choices`). What is in force applies to the process; where
nothing is, the first alternative serves that supports a launch.

To add a choice, list it in CHOICES, call `serving` where its launcher decides, and have the compile gate compile what the
alternatives launch. Starts then compile, time and check it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

HOPPER, GEMV, TILES = "Hopper kernel", "GEMV", "tiles"
ONE_LAUNCH, SPLITS, ROTATION_BEFORE = "one launch", "splits and merge", "rotation before"
ROTATION_INSIDE = "rotation inside"


@dataclass(frozen=True, slots=True)
class Choice:
    """`name`: in logs and files. `alternatives`: by preference; the last one is the oldest and supports every launch, and the
    results of the others are compared with its. `num_rows`: rows of the decode step that is timed."""

    name: str
    alternatives: tuple[str, ...]
    num_rows: int = 1

    @property
    def oldest(self) -> str:
        """The alternative that has run on a card."""
        return self.alternatives[-1]

    def serving(self, *supported: str) -> str:
        """The alternative for a launch that `supported` can serve: the one in force, or else the next older one."""
        for found in _observers:
            found.setdefault(self, set()).update(supported)
        first = self.alternatives.index(_in_force.get(self.name, self.alternatives[0]))
        return next(each for each in self.alternatives[first:] if each in supported)


PRODUCTS = {
    (16, 1): Choice("16-bit products of one row", (GEMV, TILES)),
    (8, 1): Choice("8-bit products of one row", (HOPPER, GEMV, TILES)),
    (4, 1): Choice("4-bit products of one row", (HOPPER, TILES)),
    (8, 8): Choice("8-bit products of 2 to 8 rows", (HOPPER, TILES), num_rows=8),
    (4, 8): Choice("4-bit products of 2 to 8 rows", (HOPPER, TILES), num_rows=8),
    (8, 16): Choice("8-bit products of 9 to 16 rows", (HOPPER, TILES), num_rows=16),
    (4, 16): Choice("4-bit products of 9 to 16 rows", (HOPPER, TILES), num_rows=16),
}
"""Products of rows of 16 bits, by bits of a weight and the most rows."""
LONE_ATTENTION = Choice("attention of one row", (ONE_LAUNCH, SPLITS, ROTATION_BEFORE))
FEW_ROWS_ATTENTION = Choice("attention of few rows", (ROTATION_INSIDE, ROTATION_BEFORE), num_rows=8)
CHOICES = (*PRODUCTS.values(), LONE_ATTENTION, FEW_ROWS_ATTENTION)
"""In the order in which they are decided: each with those before it in force."""

_in_force: dict[str, str] = {}
_observers: list[dict[Choice, set[str]]] = []


def put_in_force(alternatives: Mapping[str, str]) -> None:
    """From now on let these alternatives serve, by the name of their choice, and for every other choice the first one."""
    _in_force.clear()
    _in_force.update(alternatives)


def oldest_alternatives() -> dict[str, str]:
    """The oldest alternative of every choice, by its name."""
    return {choice.name: choice.oldest for choice in CHOICES}


def serving_product(bits: int, num_rows: int, *supported: str) -> str:
    """The alternative for a product of 1 to 16 rows with weights of `bits` bits."""
    choice = PRODUCTS.get((bits, 1 if num_rows <= 1 else 8 if num_rows <= 8 else 16))
    return TILES if choice is None else choice.serving(*supported)


@contextmanager
def alternative_in_force(choice: Choice, alternative: str) -> Iterator[None]:
    """Let this alternative serve within the block."""
    before = dict(_in_force)
    _in_force[choice.name] = alternative
    try:
        yield
    finally:
        put_in_force(before)


@contextmanager
def consulted() -> Iterator[dict[Choice, set[str]]]:
    """The choices that launches within the block ask for, and the alternatives that support any of these launches."""
    found: dict[Choice, set[str]] = {}
    _observers.append(found)
    try:
        yield found
    finally:
        _observers.pop()
