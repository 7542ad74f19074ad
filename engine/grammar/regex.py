"""Regular languages as trees, closed under `and` and `not`, with a matcher in polynomial time. Knows no syntax of patterns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from engine.grammar import char_sets
from engine.grammar.char_sets import CharSet


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    members: CharSet


@dataclass(frozen=True, slots=True)
class Cat:
    """A sequence of parts; without parts, the empty string."""

    parts: tuple[Regex, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """Any one of the parts; without parts, nothing matches."""

    parts: tuple[Regex, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`low` to `high` repetitions; None is unbounded."""

    inner: Regex
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class And:
    """The texts that every part matches."""

    parts: tuple[Regex, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """The texts that the inner node does not match."""

    inner: Regex


Regex: TypeAlias = Chars | Cat | Alt | Repeat | And | Not

NOTHING = Alt(())
EPSILON = Cat(())
ANY_CHAR = Chars(char_sets.ANY)
ANYTHING = Repeat(ANY_CHAR, 0, None)


def one_of(members: CharSet) -> Regex:
    return Chars(members) if members else NOTHING


def literal(text: str) -> Regex:
    return cat(*(Chars(char_sets.of(character)) for character in text))


def cat(*parts: Regex) -> Regex:
    flat: list[Regex] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, Cat) else (part,))
    if NOTHING in flat:
        return NOTHING
    return flat[0] if len(flat) == 1 else Cat(tuple(flat))


def alt(*parts: Regex) -> Regex:
    flat: dict[Regex, None] = {}
    for part in parts:
        flat.update(dict.fromkeys(part.parts if isinstance(part, Alt) else (part,)))
    members = [part for part in flat if isinstance(part, Chars)]
    others = [part for part in flat if not isinstance(part, Chars)]
    if len(members) > 1:
        members = [Chars(char_sets.union(*(part.members for part in members)))]
    joined = [*members, *others]
    return joined[0] if len(joined) == 1 else Alt(tuple(joined))


def intersection(*parts: Regex) -> Regex:
    flat: dict[Regex, None] = {}
    for part in parts:
        flat.update(dict.fromkeys(part.parts if isinstance(part, And) else (part,)))
    flat.pop(ANYTHING, None)
    if NOTHING in flat:
        return NOTHING
    if not flat:
        return ANYTHING
    return next(iter(flat)) if len(flat) == 1 else And(tuple(flat))


def complement(inner: Regex) -> Regex:
    if isinstance(inner, Not):
        return inner.inner
    if inner == NOTHING:
        return ANYTHING
    return NOTHING if inner == ANYTHING else Not(inner)


def repeat(inner: Regex, low: int, high: int | None) -> Regex:
    if high == 0 or inner == EPSILON:
        return EPSILON
    if inner == NOTHING:
        return EPSILON if low == 0 else NOTHING
    return inner if (low, high) == (1, 1) else Repeat(inner, low, high)


def is_plain(node: Regex) -> bool:
    """Whether it contains no `And` and no `Not`. If so, it matches nothing only when it is `NOTHING`."""
    if isinstance(node, Chars):
        return True
    if isinstance(node, Cat | Alt):
        return all(is_plain(part) for part in node.parts)
    return isinstance(node, Repeat) and is_plain(node.inner)


def matches(node: Regex, text: str) -> bool:
    """Whether the whole text is in the language; polynomial in its length, whatever the pattern."""
    return len(text) in _Matcher(text).ends(node, 0)


class _Matcher:
    """Sets of positions where a match of a node may end, cached for every node and start."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._cache: dict[tuple[int, int], frozenset[int]] = {}

    def ends(self, node: Regex, start: int) -> frozenset[int]:
        key = (id(node), start)
        if key not in self._cache:
            self._cache[key] = self._ends(node, start)
        return self._cache[key]

    def _ends(self, node: Regex, start: int) -> frozenset[int]:
        if isinstance(node, Chars):
            inside = start < len(self._text) and char_sets.contains(node.members, self._text[start])
            return frozenset({start + 1} if inside else ())
        if isinstance(node, Cat):
            reached = frozenset({start})
            for part in node.parts:
                reached = self._step(part, reached)
            return reached
        if isinstance(node, Alt):
            return frozenset().union(*(self.ends(part, start) for part in node.parts))
        if isinstance(node, And):
            return frozenset.intersection(*(self.ends(part, start) for part in node.parts))
        if isinstance(node, Not):
            return frozenset(range(start, len(self._text) + 1)) - self.ends(node.inner, start)
        return self._repeated(node, start)

    def _step(self, node: Regex, starts: frozenset[int]) -> frozenset[int]:
        return frozenset().union(*(self.ends(node, start) for start in starts))

    def _repeated(self, node: Repeat, start: int) -> frozenset[int]:
        reached, ends, repetitions = frozenset({start}), frozenset[int](), 0
        high = node.low + len(self._text) + 1 if node.high is None else node.high
        while reached and repetitions <= high:
            if repetitions >= node.low:
                if reached <= ends:
                    break
                ends |= reached
            following = self._step(node.inner, reached)
            if repetitions < node.low and following == reached:
                return ends | following  # the inner node matches the empty string: more rounds reach nothing new
            reached, repetitions = following, repetitions + 1
        return ends
