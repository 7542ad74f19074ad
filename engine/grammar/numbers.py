"""Numbers under bounds, multiples and exceptions, as finite automata over their decimal digits. Knows no schema and no library.

The automaton reads a JSON number without exponent. It keeps the residue of the digits so far modulo all divisors at once, and
for every bound whether the number is below, level with, or above it; both need finitely many states.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from fractions import Fraction

RESIDUES_MAX = 5000
STATES_MAX = 20_000
DECIMALS_MAX = 40
LISTED_MAX = 256


class NumberError(ValueError):
    """The constraint needs more states than a grammar may have; the message names it."""


@dataclass(frozen=True, slots=True)
class Bound:
    """`value` itself is outside when `is_open`."""

    value: Fraction
    is_open: bool


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
            all(value > b.value or (value == b.value and not b.is_open) for b in self.lows)
            and all(value < b.value or (value == b.value and not b.is_open) for b in self.highs)
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

    def listed(self) -> list[Fraction] | None:
        """All members when they are few; None when they are many or infinite."""
        low = max((b.value for b in self.lows), default=None)
        high = min((b.value for b in self.highs), default=None)
        if low is not None and high is not None and (low > high):
            return []
        if low is not None and low == high:
            return [low] if self.holds(low) else []
        step = self.step
        if step is None or low is None or high is None or (high - low) / step > LISTED_MAX:
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


# (phase, digits of the integer part, decimals read, comparison with each bound, residue, a non-zero digit beyond the scale)
_State = tuple[str, int, int, tuple[int, ...], int, bool]
_DIGITS = "0123456789"


class _Reader:
    """Steps through the magnitude of a number of one sign."""

    def __init__(self, numbers: Numbers, negative: bool) -> None:
        self.numbers = numbers
        self.negative = negative
        points = [b.value for b in (*numbers.lows, *numbers.highs)] + list(numbers.excluded)
        self.levels = sorted({abs(point) for point in points})
        divisors = (*numbers.multiples, *numbers.non_multiples)
        self.scale = max((decimals(q) for q in divisors), default=0)
        self.modulus = math.lcm(*(int(q * 10**self.scale) for q in divisors)) if divisors else 1
        if self.modulus > RESIDUES_MAX:
            raise NumberError(f"multipleOf with more than {RESIDUES_MAX} residues")
        self._judgements: dict[tuple[bool, bool], int] = {}
        self.divisors = [int(q * 10**self.scale) for q in numbers.multiples]
        self.non_divisors = [int(q * 10**self.scale) for q in numbers.non_multiples]
        self.whole = [str(int(level)) for level in self.levels]
        self.parts = [self._decimals_of(level) for level in self.levels]
        self.whole_max = max((len(digits) for digits in self.whole), default=0)
        self.part_max = max([self.scale, *(len(digits) for digits in self.parts)])

    @staticmethod
    def _decimals_of(level: Fraction) -> str:
        count = decimals(level)
        return str(int((level - int(level)) * 10**count)).zfill(count) if count else ""

    def start(self) -> _State:
        return ("sign", 0, 0, (0,) * len(self.levels), 0, False)

    def step(self, state: _State, character: str) -> _State | None:
        phase, length, place, compared, residue, beyond = state
        if character == ".":
            if phase not in ("zero", "whole") or self.numbers.is_whole:
                return None
            return ("point", 0, 0, self._after_whole(length, compared), residue if self.scale else self._judged(residue), False)
        digit = int(character)
        if phase in ("sign", "whole"):
            following = self._compared(compared, character, self.whole, length, "") if compared else ()
            residue = (residue * 10 + digit) % self.modulus
            phase = "zero" if phase == "sign" and digit == 0 else "whole"
            return (phase, min(length + 1, self.whole_max + 1), 0, following, residue, False)
        if phase == "zero":
            return None
        following = self._compared(compared, character, self.parts, place, "0") if compared else ()
        if place < self.scale:
            residue = (residue * 10 + digit) % self.modulus
            residue = self._judged(residue) if place + 1 == self.scale else residue
        else:
            beyond = beyond or digit != 0
            if beyond and self.divisors:
                return None
        return ("part", 0, min(place + 1, self.part_max), following, residue, beyond)

    def _judged(self, residue: int) -> int:
        """One representative for residues with the same verdict, once no digit can change them any more."""
        verdict = (
            any(residue % divisor for divisor in self.divisors),
            any(residue % divisor == 0 for divisor in self.non_divisors),
        )
        return self._judgements.setdefault(verdict, residue)

    @staticmethod
    def _compared(compared: tuple[int, ...], character: str, digits: list[str], at: int, beyond: str) -> tuple[int, ...]:
        """Comparisons after one more digit. After the last digit of a bound, compare with `beyond`, unless that is empty."""
        others = [each[at : at + 1] or beyond for each in digits]
        return tuple(sign or (_sign(character, other) if other else 0) for sign, other in zip(compared, others, strict=True))

    def _after_whole(self, length: int, compared: tuple[int, ...]) -> tuple[int, ...]:
        """Comparisons once the integer part is complete: more digits are a greater number."""
        return tuple(
            sign if length == len(self.whole[i]) else (-1 if length < len(self.whole[i]) else 1)
            for i, sign in enumerate(compared)
        )

    def is_member(self, state: _State) -> bool:
        phase, length, place, compared, residue, beyond = state
        if phase not in ("zero", "whole", "part"):
            return False
        signs: tuple[int, ...] = ()
        if phase == "part":
            signs = tuple(sign or (-1 if self.parts[i][place:].strip("0") else 0) for i, sign in enumerate(compared))
        else:
            signs = tuple(sign or (-1 if self.parts[i] else 0) for i, sign in enumerate(self._after_whole(length, compared)))
            place = 0
        scaled = residue * 10 ** (self.scale - min(place, self.scale)) % self.modulus
        return self._allows(dict(zip(self.levels, signs, strict=True)), scaled, beyond)

    def _allows(self, signs: dict[Fraction, int], scaled: int, beyond: bool) -> bool:
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
            not any(beyond or scaled % divisor for divisor in self.divisors)
            and not any(not beyond and scaled % divisor == 0 for divisor in self.non_divisors)
            and all(compare(b.value) >= (1 if b.is_open else 0) for b in numbers.lows)
            and all(compare(b.value) <= (-1 if b.is_open else 0) for b in numbers.highs)
            and all(compare(point) != 0 for point in numbers.excluded)
        )


def _sign(digit: str, other: str) -> int:
    return (digit > other) - (digit < other)


def automaton(numbers: Numbers) -> Automaton:
    """The automaton of the JSON spellings, without exponent, of exactly these numbers. Raises `NumberError`."""
    made = Automaton(edges=[{}])
    reader = _Reader(numbers, negative=False)
    _explore(made, reader, 0)
    minus = len(made.edges)
    if reader.levels:
        made.edges.append({})
        _explore(made, _Reader(numbers, negative=True), minus)
    else:
        made.edges.append(dict(made.edges[0]))  # without bounds a sign makes no difference
    made.edges[0]["-"] = minus
    return _trimmed(made)


def _explore(made: Automaton, reader: _Reader, start: int) -> None:
    """Add every state that the reader reaches from its start, which is state `start`."""
    known = {reader.start(): start}
    characters = _DIGITS if reader.numbers.is_whole else _DIGITS + "."
    waiting = deque(known)
    while waiting:
        state = waiting.popleft()
        for character in characters:
            following = reader.step(state, character)
            if following is None:
                continue
            if following not in known:
                if len(made.edges) >= STATES_MAX:
                    raise NumberError(f"a number whose bounds and multiples need more than {STATES_MAX} states")
                known[following] = len(made.edges)
                made.edges.append({})
                waiting.append(following)
            made.edges[known[state]][character] = known[following]
        if reader.is_member(state):
            made.accepting.add(known[state])


def _trimmed(made: Automaton) -> Automaton:
    """Without the states from which no number can be completed, and with equal states joined."""
    before: dict[int, list[int]] = {}
    for state, edges in enumerate(made.edges):
        for following in edges.values():
            before.setdefault(following, []).append(state)
    alive, waiting = set(made.accepting), list(made.accepting)
    while waiting:
        for state in before.get(waiting.pop(), ()):
            if state not in alive:
                alive.add(state)
                waiting.append(state)
    if 0 not in alive:
        return Automaton()
    return _joined([{c: n for c, n in edges.items() if n in alive} for edges in made.edges], made.accepting, alive)


def _joined(edges: list[dict[str, int]], accepting: set[int], alive: set[int]) -> Automaton:
    """Moore's partition refinement: states that cannot be told apart become one."""
    block = {state: int(state in accepting) for state in alive}
    count = len(set(block.values()))
    while True:
        signs = {s: (block[s], tuple(sorted((c, block[n]) for c, n in edges[s].items()))) for s in alive}
        names = {sign: number for number, sign in enumerate(dict.fromkeys(signs[s] for s in sorted(alive)))}
        block = {state: names[signs[state]] for state in alive}
        if len(names) == count:
            break
        count = len(names)
    joined = Automaton(edges=[{} for _ in range(count)])
    for state in sorted(alive):
        joined.edges[block[state]] = {c: block[n] for c, n in edges[state].items()}
        if state in accepting:
            joined.accepting.add(block[state])
    assert block[0] == 0
    return joined
