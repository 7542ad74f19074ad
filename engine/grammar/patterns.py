"""Reads the patterns of JSON Schema (ECMA-262) and of `guided_regex` (Python's), which differ little, into regular languages.

A construct that no regular language expresses, or that the two dialects read differently, is refused by name. Where they agree
on the syntax but not on the members of a class (`\\d` is ASCII in one and Unicode in the other), a pattern means what both
allow, and under a negation (`wide`) what either allows. So an accepted text is right in both.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from engine.grammar import char_sets
from engine.grammar.char_sets import CharSet
from engine.grammar.regex import (
    ANY_CHAR,
    ANYTHING,
    EPSILON,
    NOTHING,
    Chars,
    Regex,
    alt,
    cat,
    complement,
    intersection,
    literal,
    one_of,
    repeat,
)

REPEAT_MAX = 100_000
GROUP_DEPTH_MAX = 60
ALTERNATIVES_MAX = 256
_ESCAPED = {"t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r", "0": "\0"}


class PatternError(ValueError):
    """The pattern is malformed or uses a construct that is not regular; the message names it."""


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    parts: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Repeated:
    inner: _Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class _Anchor:
    at_start: bool


@dataclass(frozen=True, slots=True)
class _Lookahead:
    inner: _Node
    negative: bool


_Node: TypeAlias = Chars | _Sequence | _Choice | _Repeated | _Anchor | _Lookahead


@functools.lru_cache(maxsize=4096)
def search_language(pattern: str, *, wide: bool = False) -> Regex:
    """Every text in which the pattern is found somewhere, as JSON Schema reads `pattern`. Raises `PatternError`."""
    return _search_language(_Parser(pattern, wide).parse(), wide)


def full_language(pattern: str) -> Regex:
    """Every text that the pattern matches as a whole. Raises `PatternError`."""
    return _language((_Parser(pattern, False).parse(),), True, False, False)


def _assertions(node: _Node) -> Iterator[_Anchor | _Lookahead]:
    """The anchors and lookaheads in it, also those in lookaheads."""
    if isinstance(node, _Anchor | _Lookahead):
        yield node
    if isinstance(node, _Sequence | _Choice):
        for part in node.parts:
            yield from _assertions(part)
    elif isinstance(node, _Repeated | _Lookahead):
        yield from _assertions(node.inner)


def _plain_language(node: _Node) -> Regex:
    """The language of a node without anchors and lookaheads."""
    if isinstance(node, Chars):
        return one_of(node.members)
    if isinstance(node, _Sequence):
        return cat(*(_plain_language(part) for part in node.parts))
    if isinstance(node, _Choice):
        return alt(*(_plain_language(part) for part in node.parts))
    assert isinstance(node, _Repeated), "an anchor or a lookahead"
    return repeat(_plain_language(node.inner), node.low, node.high)


def _may_be_empty(node: _Node) -> bool:
    """Whether a node without anchors and lookaheads matches the empty text."""
    if isinstance(node, _Sequence):
        return all(_may_be_empty(part) for part in node.parts)
    if isinstance(node, _Choice):
        return any(_may_be_empty(part) for part in node.parts)
    return isinstance(node, _Repeated) and (node.low == 0 or _may_be_empty(node.inner))


def _search_language(node: _Node, wide: bool) -> Regex:
    """The texts in which a node is found: at their start or, where `^` does not match, behind at least one character."""
    if isinstance(node, _Choice):
        return alt(*(_search_language(part, wide) for part in node.parts))
    if not any(isinstance(assertion, _Anchor) and assertion.at_start for assertion in _assertions(node)):
        return cat(ANYTHING, _language((node,), None, True, wide))
    later = _language((node,), False, True, wide)
    return alt(_language((node,), True, True, wide), cat(repeat(ANY_CHAR, 1, None), later))


def _language(parts: tuple[_Node, ...], at_start: bool | None, open_right: bool, wide: bool) -> Regex:
    """The language of `parts` up to the end of the text. `at_start`: whether they begin where the text does, None if either is
    possible; `open_right`: anything may follow."""
    if not parts:
        return ANYTHING if open_right else EPSILON
    first, others = parts[0], parts[1:]
    if next(_assertions(first), None) is None:
        after = None if at_start is not False and _may_be_empty(first) else False
        return cat(_plain_language(first), _language(others, after, open_right, wide))
    if isinstance(first, _Sequence):
        return _language(first.parts + others, at_start, open_right, wide)
    if isinstance(first, _Lookahead):
        ahead = _language((first.inner,), at_start, True, wide != first.negative)
        return intersection(_language(others, at_start, open_right, wide), complement(ahead) if first.negative else ahead)
    if isinstance(first, _Choice):
        if len(first.parts) > ALTERNATIVES_MAX:
            raise PatternError(f"more than {ALTERNATIVES_MAX} alternatives with anchors")
        return alt(*(_language((part, *others), at_start, open_right, wide) for part in first.parts))
    if isinstance(first, _Repeated):
        raise PatternError("a repeated anchor or lookahead")
    if isinstance(first, _Anchor) and not first.at_start:
        return _after_end(others, wide)
    if at_start is None:
        raise PatternError("^ after what may be empty")
    return _language(others, True, open_right, wide) if at_start else NOTHING


def _after_end(others: tuple[_Node, ...], wide: bool) -> Regex:
    """`$` and what follows it, which can only match the empty string. In Python `$` also matches before a last newline."""
    if any(not (isinstance(part, _Anchor) and not part.at_start) for part in others):
        raise PatternError("$ before the end")
    return alt(EPSILON, literal("\n")) if wide else EPSILON


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, pattern: str, wide: bool) -> None:
        self._text = pattern
        self._pos = 0
        self._wide = wide
        self._depth = 0

    def parse(self) -> _Node:
        node = self._choice()
        if self._pos < len(self._text):
            raise PatternError(f"an unopened ) at {self._pos}")
        return node

    def _peek(self, text: str) -> bool:
        return self._text.startswith(text, self._pos)

    def _accept(self, text: str) -> bool:
        if self._peek(text):
            self._pos += len(text)
            return True
        return False

    def _next(self) -> str:
        if self._pos >= len(self._text):
            raise PatternError("an unfinished construct at the end")
        self._pos += 1
        return self._text[self._pos - 1]

    def _choice(self) -> _Node:
        parts = [self._sequence()]
        while self._accept("|"):
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else _Choice(tuple(parts))

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while self._pos < len(self._text) and not self._peek("|") and not self._peek(")"):
            parts.append(self._quantified(self._atom()))
        return _Sequence(tuple(parts))

    def _quantified(self, atom: _Node) -> _Node:
        bounds = self._bounds()
        if bounds is None:
            return atom
        if isinstance(atom, _Anchor | _Lookahead):
            raise PatternError("a repeated anchor or lookahead")
        self._accept("?")  # a lazy match has the same language
        if self._peek("+") or self._peek("*") or self._peek("?"):
            raise PatternError(f"a quantifier after a quantifier at {self._pos}")
        low, high = bounds
        if max(low, high or 0) > REPEAT_MAX:
            raise PatternError(f"a repetition of more than {REPEAT_MAX}")
        if high is not None and high < low:
            raise PatternError(f"the repetition {{{low},{high}}}")
        return _Repeated(atom, low, high)

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._accept(sign):
                return bounds
        if not self._peek("{"):
            return None
        end = self._text.find("}", self._pos)
        low, comma, high = self._text[self._pos + 1 : end].partition(",") if end > 0 else ("", "", "")
        digits = [part for part in (low, high) if part]
        if end < 0 or not digits or not all(part.isascii() and part.isdigit() for part in digits):
            return None  # a literal brace
        if not low:
            raise PatternError(f"the repetition {{,{high}}}, which dialects read in two ways")
        if any(len(part.lstrip("0")) > len(str(REPEAT_MAX)) for part in digits):
            raise PatternError(f"a repetition of more than {REPEAT_MAX}")
        self._pos = end + 1
        if not comma:
            return int(low), int(low)
        return int(low), int(high) if high else None

    def _is_repetition(self) -> bool:
        """Whether the brace just read begins a repetition; otherwise it is literal."""
        after_brace, self._pos = self._pos, self._pos - 1
        bounds, self._pos = self._bounds(), after_brace
        return bounds is not None

    def _atom(self) -> _Node:
        character = self._next()
        if character == "(":
            return self._group()
        if character == "[":
            return Chars(self._class())
        if character == ".":
            newline = char_sets.NEWLINE_EVERYWHERE if self._wide else char_sets.NEWLINE_SOMEWHERE
            return Chars(char_sets.complement(newline))
        if character in "^$":
            return _Anchor(character == "^")
        if character in "*+?" or (character == "{" and self._is_repetition()):
            raise PatternError(f"nothing to repeat at {self._pos - 1}")
        if character == "\\":
            return self._escape()
        return Chars(char_sets.of(character))

    def _group(self) -> _Node:
        self._depth += 1
        if self._depth > GROUP_DEPTH_MAX:
            raise PatternError(f"groups nested more than {GROUP_DEPTH_MAX} deep")
        is_negative: bool | None = None
        if self._accept("?"):
            is_negative = self._group_kind()
        self._wide ^= is_negative is True  # inside a negation the other reading is the strict one
        inner = self._choice()
        self._wide ^= is_negative is True
        if not self._accept(")"):
            raise PatternError("an unclosed (")
        self._depth -= 1
        return inner if is_negative is None else _Lookahead(inner, is_negative)

    def _group_kind(self) -> bool | None:
        """After `(?`: None for a plain group, else whether the lookahead is negative."""
        if self._accept(":"):
            return None
        for sign, negative in (("=", False), ("!", True)):
            if self._accept(sign):
                return negative
        if self._peek("<=") or self._peek("<!"):
            raise PatternError("a lookbehind (?<=…) or (?<!…)")
        if self._accept("P<") or self._accept("<"):
            end = self._text.find(">", self._pos)
            if end < 0 or not self._text[self._pos : end].isidentifier():
                raise PatternError("a malformed group name")
            self._pos = end + 1
            return None
        raise PatternError(f"the group (?{self._text[self._pos : self._pos + 1]}…")

    def _escape(self) -> _Node:
        start = self._pos
        character = self._next()
        if character in "bB":
            raise PatternError(f"a word boundary \\{character}")
        if character in "AZz":
            raise PatternError(f"\\{character}, which only some dialects know")
        if character in "123456789k":
            raise PatternError("a back-reference")
        self._pos = start
        return Chars(self._escaped_set())

    def _escaped_set(self) -> CharSet:
        """After a backslash, inside a class or outside: a set of characters."""
        character = self._next()
        if character in "dws":
            return char_sets.named(character, wide=self._wide)
        if character in "DWS":
            return char_sets.complement(char_sets.named(character.lower(), wide=not self._wide))
        if character in "pP":
            return self._category(character == "P")
        if character == "0" and self._text[self._pos : self._pos + 1].isdigit():
            raise PatternError("an octal escape")
        if character in _ESCAPED:
            return char_sets.of(_ESCAPED[character])
        if character == "c":
            letter = self._next()
            if not (letter.isascii() and letter.isalpha()):
                raise PatternError("a malformed \\c escape")
            return char_sets.of(chr(ord(letter) % 32))
        if character in "xu":
            return self._code_point(character)
        if character.isalnum():
            raise PatternError(f"the unknown escape \\{character}")
        return char_sets.of(character)

    def _category(self, negated: bool) -> CharSet:
        end = self._text.find("}", self._pos)
        name = self._text[self._pos + 1 : end] if self._peek("{") and end > 0 else ""
        members = char_sets.category(name)
        if members is None:
            raise PatternError(f"the character property \\p{{{name}}}")
        self._pos = end + 1
        return char_sets.complement(members) if negated else members

    def _code_point(self, letter: str) -> CharSet:
        if letter == "u" and self._accept("{"):
            end = self._text.find("}", self._pos)
            point = self._hex(self._text[self._pos : max(end, self._pos)])
            self._pos = end + 1
        else:
            point = self._hex_digits(2 if letter == "x" else 4)
        if 0xD800 <= point <= 0xDBFF and self._accept("\\u"):
            low = self._hex_digits(4)
            if not 0xDC00 <= low <= 0xDFFF:
                raise PatternError("half of a surrogate pair")
            point = 0x10000 + ((point - 0xD800) << 10) + low - 0xDC00
        if point > char_sets.LAST:
            raise PatternError("a code point beyond Unicode")
        return char_sets.chars((point, point))

    def _hex_digits(self, count: int) -> int:
        digits = self._text[self._pos : self._pos + count]
        self._pos += count
        return self._hex(digits if len(digits) == count else "")

    def _hex(self, digits: str) -> int:
        try:
            if digits.isascii() and digits.isalnum():  # `int` alone accepts signs, blanks, underscores and other digits
                return int(digits, 16)
        except ValueError:
            pass
        raise PatternError("a malformed hexadecimal escape")

    def _class(self) -> CharSet:
        """After `[`, up to its `]`. In a negated class `wide` is inverted for the members, as in a negation."""
        negated = self._accept("^")
        if self._peek("]"):
            raise PatternError("an empty class [] or a ] first in a class, which dialects read differently")
        if negated:
            self._wide = not self._wide
        members: list[CharSet] = []
        while not self._accept("]"):
            first = self._member()
            if self._peek("-") and not self._peek("-]"):
                self._pos += 1
                members.append(self._range(first, self._member()))
            else:
                members.append(first)
        if negated:
            self._wide = not self._wide
            return char_sets.complement(char_sets.union(*members))
        return char_sets.union(*members)

    def _range(self, first: CharSet, last: CharSet) -> CharSet:
        single = all(len(end) == 1 and end[0][0] == end[0][1] for end in (first, last))
        if not single:
            return char_sets.union(first, char_sets.of("-"), last)  # `[\w-.]`: the hyphen is literal
        if first[0][0] > last[0][0]:
            raise PatternError("a range of characters that runs backwards")
        return char_sets.chars((first[0][0], last[0][0]))

    def _member(self) -> CharSet:
        character = self._next()
        if character != "\\":
            return char_sets.of(character)
        return char_sets.of("\b") if self._accept("b") else self._escaped_set()
