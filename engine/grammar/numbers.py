"""Numbers under bounds, multiples and exceptions, as finite automata over their decimal digits. Knows no schema and no library.

The automaton reads a JSON number without exponent. It keeps the residue of the digits so far modulo all divisors at once, for
every bound whether the number is below, level with, or above it, and the exceptions that begin like the number; all three need
finitely many states.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeVar

RESIDUES_MAX = 5000
STATES_MAX = 20_000
DECIMALS_MAX = 40
ENUMERATED_MAX = 256


class NumberError(ValueError):
    """The constraint needs more states than a grammar may have; the message names it."""


@dataclass(frozen=True, slots=True)
class Bound:
    """`value` itself is outside when `is_exclusive`."""

    value: Fraction
    is_exclusive: bool


@dataclass(frozen=True, slots=True)
class Numbers:
    """A set of numbers: within every bound, a multiple of all `multiples`, of none of `non_multiples`, and not `excluded`.

    `is_whole` requires integers written as such: not `1.0`, which many readers do not accept as an integer."""

    lows: tuple[Bound, ...] = ()
    highs: tuple[Bound, ...] = ()
    multiples: tuple[Fraction, ...] = ()
    non_multiples: tuple[Fraction, ...] = ()
    excluded: tuple[Fraction, ...] = ()
    is_whole: bool = False

    @property
    def is_free(self) -> bool:
        return self == Numbers()

    def holds(self, value: Fraction) -> bool:
        return (
            all(value > b.value or (value == b.value and not b.is_exclusive) for b in self.lows)
            and all(value < b.value or (value == b.value and not b.is_exclusive) for b in self.highs)
            and all((value / q).denominator == 1 for q in self.multiples)
            and not any((value / q).denominator == 1 for q in self.non_multiples)
            and value not in self.excluded
        )

    @property
    def step(self) -> Fraction | None:
        """The least common multiple of `multiples`; None when there are none."""
        if not self.multiples:
            return None
        denominator = math.lcm(*(q.denominator for q in self.multiples))
        return Fraction(math.lcm(*(int(q * denominator) for q in self.multiples)), denominator)

    def enumerated(self) -> list[Fraction] | None:
        """All members when they are few; None when they are many or infinite."""
        low = max((b.value for b in self.lows), default=None)
        high = min((b.value for b in self.highs), default=None)
        if low is not None and high is not None and (low > high):
            return []
        if low is not None and low == high:
            return [low] if self.holds(low) else []
        step = self.step
        if step is None or low is None or high is None or (high - low) / step > ENUMERATED_MAX:
            return None
        first, last = math.ceil(low / step), math.floor(high / step)
        return [value for count in range(first, last + 1) if self.holds(value := count * step)]


@dataclass(slots=True)
class Automaton:
    """States are numbered from 0, the start. `edges[s]` maps a character to the next state. No state is a dead end, except that
    `edges` is empty when there is no number at all."""

    edges: list[dict[str, int]] = field(default_factory=list)
    accepting: set[int] = field(default_factory=set)


def decimals(value: Fraction) -> int:
    """Digits after the point that `value` needs. Raises `NumberError` when they are infinite or too many."""
    count = 0
    while (value * 10**count).denominator != 1:
        count += 1
        if count > DECIMALS_MAX:
            raise NumberError(f"a number with more than {DECIMALS_MAX} decimals")
    return count


# (phase, digits of the integer part, decimals read, comparison with each bound, the excluded numbers that begin like this one,
# residue, a non-zero digit beyond the scale)
_State = tuple[str, int, int, tuple[int, ...], frozenset[int], int, bool]
_DIGITS = "0123456789"

Ordered = TypeVar("Ordered", int, str)


class _DigitReader:
    """Steps through the magnitude of a number of one sign."""

    def __init__(self, numbers: Numbers, negative: bool) -> None:
        self.numbers = numbers
        self.negative = negative
        self.magnitudes = sorted({abs(b.value) for b in (*numbers.lows, *numbers.highs)})
        excluded = [abs(value) for value in numbers.excluded if not value or (value < 0) == negative]
        divisors = (*numbers.multiples, *numbers.non_multiples)
        self.scale = max((decimals(q) for q in divisors), default=0)
        self.modulus = math.lcm(*(int(q * 10**self.scale) for q in divisors)) if divisors else 1
        if self.modulus > RESIDUES_MAX:
            raise NumberError(f"multipleOf with more than {RESIDUES_MAX} residues")
        self._representatives: dict[tuple[bool, bool], int] = {}
        self.divisors = [int(q * 10**self.scale) for q in numbers.multiples]
        self.non_divisors = [int(q * 10**self.scale) for q in numbers.non_multiples]
        self.integer_parts = [str(int(magnitude)) for magnitude in self.magnitudes]
        self.decimal_parts = [self._decimals_of(magnitude) for magnitude in self.magnitudes]
        self.excluded_integers = [str(int(magnitude)) for magnitude in excluded]
        self.excluded_decimals = [self._decimals_of(magnitude) for magnitude in excluded]
        self.integer_len_max = max((len(digits) for digits in (*self.integer_parts, *self.excluded_integers)), default=0)
        self.decimal_len_max = max([self.scale, *(len(digits) for digits in (*self.decimal_parts, *self.excluded_decimals))])

    @staticmethod
    def _decimals_of(magnitude: Fraction) -> str:
        count = decimals(magnitude)
        return str(int((magnitude - int(magnitude)) * 10**count)).zfill(count) if count else ""

    def start(self) -> _State:
        return ("sign", 0, 0, (0,) * len(self.magnitudes), frozenset(range(len(self.excluded_integers))), 0, False)

    def step(self, state: _State, character: str) -> _State | None:
        phase, num_digits, num_decimals, comparisons, excluded, residue, exceeds_scale = state
        if character == ".":
            if phase not in ("zero", "whole"):
                return None
            if not self.scale:
                residue = self._representative(residue)
            excluded = frozenset(i for i in excluded if len(self.excluded_integers[i]) == num_digits)
            return ("point", 0, 0, self._compare_lengths(num_digits, comparisons), excluded, residue, False)
        digit = int(character)
        if phase in ("sign", "whole"):
            if comparisons:
                comparisons = self._compare_digit(comparisons, character, self.integer_parts, num_digits, "")
            if excluded:
                excluded = frozenset(i for i in excluded if self.excluded_integers[i][num_digits : num_digits + 1] == character)
            residue = (residue * 10 + digit) % self.modulus
            phase = "zero" if phase == "sign" and digit == 0 else "whole"
            return (phase, min(num_digits + 1, self.integer_len_max + 1), 0, comparisons, excluded, residue, False)
        if phase == "zero":
            return None
        if comparisons:
            comparisons = self._compare_digit(comparisons, character, self.decimal_parts, num_decimals, "0")
        if excluded:
            decimal = slice(num_decimals, num_decimals + 1)
            excluded = frozenset(i for i in excluded if (self.excluded_decimals[i][decimal] or "0") == character)
        if num_decimals < self.scale:
            residue = (residue * 10 + digit) % self.modulus
            residue = self._representative(residue) if num_decimals + 1 == self.scale else residue
        else:
            exceeds_scale = exceeds_scale or digit != 0
            if exceeds_scale and self.divisors:
                return None
        return ("part", 0, min(num_decimals + 1, self.decimal_len_max), comparisons, excluded, residue, exceeds_scale)

    def _representative(self, residue: int) -> int:
        """One representative for residues with the same verdict, once no digit can change them any more."""
        verdict = (
            any(residue % divisor for divisor in self.divisors),
            any(residue % divisor == 0 for divisor in self.non_divisors),
        )
        return self._representatives.setdefault(verdict, residue)

    @staticmethod
    def _compare_digit(
        comparisons: tuple[int, ...], character: str, digits: list[str], index: int, padding: str
    ) -> tuple[int, ...]:
        """Comparisons after one more digit. After the last digit of a bound, compare with `padding`; if that is empty, the
        number is greater, for it has more digits."""
        others = [bound_digits[index : index + 1] or padding for bound_digits in digits]
        return tuple((sign or _sign(character, other)) if other else 1 for sign, other in zip(comparisons, others, strict=True))

    def _compare_lengths(self, num_digits: int, comparisons: tuple[int, ...]) -> tuple[int, ...]:
        """Comparisons once the integer part is complete: more digits are a greater number."""
        parts = zip(comparisons, self.integer_parts, strict=True)
        return tuple(_sign(num_digits, len(digits)) or sign for sign, digits in parts)

    def is_accepting(self, state: _State) -> bool:
        phase, num_digits, num_decimals, comparisons, excluded, residue, exceeds_scale = state
        if phase not in ("zero", "whole", "part"):
            return False
        if phase != "part":
            comparisons, num_decimals = self._compare_lengths(num_digits, comparisons), 0
            excluded = frozenset(i for i in excluded if len(self.excluded_integers[i]) == num_digits)
        if not all(self.excluded_decimals[i][num_decimals:] for i in excluded):
            return False
        rests = [digits[num_decimals:] for digits in self.decimal_parts]
        signs = [sign or (-1 if rest else 0) for sign, rest in zip(comparisons, rests, strict=True)]
        scaled = residue * 10 ** (self.scale - min(num_decimals, self.scale)) % self.modulus
        return self._allows(dict(zip(self.magnitudes, signs, strict=True)), scaled, exceeds_scale)

    def _allows(self, signs: dict[Fraction, int], scaled: int, exceeds_scale: bool) -> bool:
        numbers = self.numbers

        def compare(point: Fraction) -> int:
            """The number against `point`: -1, 0 or 1."""
            magnitude = signs[abs(point)]
            if not self.negative:
                return 1 if point < 0 else magnitude
            if point > 0:
                return -1
            return -magnitude

        return (
            not any(scaled % divisor for divisor in self.divisors)
            and not any(not exceeds_scale and scaled % divisor == 0 for divisor in self.non_divisors)
            and all(compare(b.value) >= (1 if b.is_exclusive else 0) for b in numbers.lows)
            and all(compare(b.value) <= (-1 if b.is_exclusive else 0) for b in numbers.highs)
        )


def _sign(one: Ordered, other: Ordered) -> int:
    """-1, 0 or 1 for less, equal or more."""
    return (one > other) - (one < other)


def build_automaton(numbers: Numbers) -> Automaton:
    """The automaton of the JSON spellings, without exponent, of exactly these numbers. Raises `NumberError`."""
    automaton = Automaton(edges=[{}])
    reader = _DigitReader(numbers, negative=False)
    _explore(automaton, reader, 0)
    minus = len(automaton.edges)
    if numbers.lows or numbers.highs or numbers.excluded:
        automaton.edges.append({})
        _explore(automaton, _DigitReader(numbers, negative=True), minus)
    else:
        automaton.edges.append(dict(automaton.edges[0]))  # without bounds a sign makes no difference
    automaton.edges[0]["-"] = minus
    return _without_dead_states(automaton)


def is_empty(numbers: Numbers) -> bool:
    """Whether there is no such number. Raises `NumberError`."""
    step = numbers.step
    if step is not None and any((step / q).denominator == 1 for q in numbers.non_multiples):
        return True
    if not numbers.lows or not numbers.highs:
        return False  # of the multiples of `step`, those of no `non_multiples` go on without end
    readers = (_DigitReader(numbers, negative) for negative in (False, True))
    return not any(reader.is_accepting(state) for reader in readers for state, _ in _reached(reader))


def _explore(automaton: Automaton, reader: _DigitReader, start: int) -> None:
    """Add every state that the reader reaches from its start, which is state `start`."""
    state_ids = {reader.start(): start}
    for state, following_by_character in _reached(reader):
        edges = automaton.edges[state_ids[state]]
        for character, following in following_by_character.items():
            if following not in state_ids:
                state_ids[following] = len(automaton.edges)
                automaton.edges.append({})
            edges[character] = state_ids[following]
        if reader.is_accepting(state):
            automaton.accepting.add(state_ids[state])


def _reached(reader: _DigitReader) -> Iterator[tuple[_State, dict[str, _State]]]:
    """Every state that a reader reaches, with the state that follows each character; those of few characters first."""
    characters = _DIGITS if reader.numbers.is_whole else _DIGITS + "."
    seen = {reader.start()}
    worklist = deque(seen)
    while worklist:
        state = worklist.popleft()
        edges = {character: following for character in characters if (following := reader.step(state, character)) is not None}
        new = dict.fromkeys(following for following in edges.values() if following not in seen)
        seen.update(new)
        if len(seen) > STATES_MAX:
            raise NumberError(f"a number whose bounds and multiples need more than {STATES_MAX} states")
        worklist.extend(new)
        yield state, edges


def _without_dead_states(automaton: Automaton) -> Automaton:
    """Without the states from which no number can be completed, and with equal states joined."""
    predecessors: dict[int, list[int]] = {}
    for state, edges in enumerate(automaton.edges):
        for following in edges.values():
            predecessors.setdefault(following, []).append(state)
    live, worklist = set(automaton.accepting), list(automaton.accepting)
    while worklist:
        for state in predecessors.get(worklist.pop(), ()):
            if state not in live:
                live.add(state)
                worklist.append(state)
    if 0 not in live:
        return Automaton()
    return _merge_equivalent(
        [{c: n for c, n in edges.items() if n in live} for edges in automaton.edges], automaton.accepting, live
    )


def _merge_equivalent(edges: list[dict[str, int]], accepting: set[int], live: set[int]) -> Automaton:
    """Moore's partition refinement: indistinguishable states become one. Every state lists its characters in the same order."""
    signatures = {state: (state in accepting, *edges[state]) for state in sorted(live)}
    count = 0
    while True:
        names = {signature: number for number, signature in enumerate(dict.fromkeys(signatures.values()))}
        block = {state: names[signature] for state, signature in signatures.items()}
        if len(names) == count:
            break
        count = len(names)
        signatures = {state: (number, *[block[n] for n in edges[state].values()]) for state, number in block.items()}
    merged = Automaton(edges=[{} for _ in range(count)])
    for state in sorted(live):
        merged.edges[block[state]] = {c: block[n] for c, n in edges[state].items()}
        if state in accepting:
            merged.accepting.add(block[state])
    assert block[0] == 0
    return merged
