"""Regular languages as terminals of a Lark grammar: of the text itself, or of its spelling inside a JSON string.

A character has one or more spellings in JSON (RFC 8259, section 7). Printable ASCII is written as it is, `"` and `\\` with a
backslash, `/` either way; control characters by their short escape or `\\u`; all else as it is or by `\\u`, beyond the basic
plane as a pair. Every text has a spelling here and no two texts share one, so `not` means the same before and after.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from engine.grammar import char_sets
from engine.grammar.char_sets import CharSet
from engine.grammar.regex import And, Cat, Chars, Not, Regex, Repeat

_SHORT = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", ord('"'): '"', ord("\\"): "\\", ord("/"): "/"}
_RAW = char_sets.complement(char_sets.union(char_sets.chars((0, 0x1F)), char_sets.of('"\\')))
_UNICODE_ESCAPED = char_sets.complement(char_sets.chars((0x20, 0x7E)))
_BASIC = char_sets.chars((0, 0xFFFF))
_NEVER = r"[^\x00-\x{10FFFF}]"


class Terminals:
    """Named terminals of one grammar; equal languages share a name."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def name(self, expression: str, prefix: str = "T") -> str:
        """The name of a terminal with this definition."""
        if expression not in self._names:
            self._names[expression] = f"{prefix}{len(self._names)}"
        return self._names[expression]

    def lines(self) -> Iterator[str]:
        for expression, name in self._names.items():
            yield f"{name}: {expression}"

    def text(self, language: Regex) -> str:
        """A definition of the texts themselves."""
        return self._expression(language, in_json=False)

    def json_string(self, language: Regex) -> str:
        """A definition of the JSON strings, quotes included, whose values are in the language."""
        return f'/"/ {self._expression(language, in_json=True)} /"/'

    def _expression(self, node: Regex, in_json: bool) -> str:
        if isinstance(node, Chars):
            spelling = _json_spelling(node.members) if in_json else _class(node.members)
            return f"/{spelling}/" if len(spelling) < 12 else self.name(f"/{spelling}/", "C")
        if isinstance(node, Cat):
            return self._sequence(node, in_json)
        if isinstance(node, Repeat):
            return f"{self._group(node.inner, in_json)}{_quantifier(node.low, node.high)}"
        if isinstance(node, Not):
            # The complement of bytes, restricted to valid text.
            everything = self.name(f"/({_json_spelling(char_sets.ANY) if in_json else _class(char_sets.ANY)})*/", "ALL")
            return f"({everything} & ~{self._group(node.inner, in_json)})"
        if not node.parts:
            return f"/{_NEVER}/"
        sign = " & " if isinstance(node, And) else " | "
        return "(" + sign.join(self._group(part, in_json) for part in node.parts) + ")"

    def _group(self, node: Regex, in_json: bool) -> str:
        return f"({self._expression(node, in_json)})"

    def _sequence(self, node: Cat, in_json: bool) -> str:
        """Single characters in a row become one literal pattern."""
        pieces: list[str] = []
        literal = ""
        for part in node.parts:
            if isinstance(part, Chars) and len(part.members) == 1 and part.members[0][0] == part.members[0][1]:
                literal += _json_spelling(part.members) if in_json else _class(part.members)
                continue
            if literal:
                pieces.append(f"/{literal}/")
                literal = ""
            inner = self._expression(part, in_json)
            pieces.append(f"({inner})" if isinstance(part, Cat) else inner)
        if literal:
            pieces.append(f"/{literal}/")
        return " ".join(pieces) if pieces else '""'


def _quantifier(low: int, high: int | None) -> str:
    if high is None:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    return "?" if (low, high) == (0, 1) else f"{{{low},{high}}}"


def _escaped(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:X}}}"


def _class(members: CharSet) -> str:
    """A character class of the library's regular expressions."""
    if not members:
        return _NEVER
    if len(members) == 1 and members[0][0] == members[0][1]:
        return _escaped(members[0][0])
    return "[" + "".join(_escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}" for low, high in members) + "]"


@functools.lru_cache(maxsize=4096)
def _json_spelling(members: CharSet) -> str:
    """Every spelling in JSON of one character of the set, as a pattern."""
    spellings: list[str] = []
    raw = char_sets.intersect(members, _RAW)
    if raw:
        spellings.append(_class(raw))
    short = [letter for code, letter in _SHORT.items() if char_sets.contains(members, chr(code))]
    if short:
        spellings.append(r"\\[" + "".join(_escaped(ord(letter)) for letter in short) + "]")
    numbered = char_sets.intersect(members, _UNICODE_ESCAPED)
    for low, high in char_sets.intersect(numbered, _BASIC):
        spellings.extend(r"\\u" + digits for digits in _hex_range(low, high, 4))
    for low, high in numbered:
        if high > 0xFFFF:
            spellings.extend(_surrogate_pairs(max(low, 0x10000), high))
    if not spellings:
        return _NEVER
    return spellings[0] if len(spellings) == 1 else "(" + "|".join(spellings) + ")"


def _surrogate_pairs(low: int, high: int) -> Iterator[str]:
    """Surrogate pairs of the code points low … high."""
    first, last = (low - 0x10000) >> 10, (high - 0x10000) >> 10
    start, end = (low - 0x10000) & 0x3FF, (high - 0x10000) & 0x3FF
    if first == last:
        spans = [(first, first, start, end)]
    else:
        spans = [(first, first, start, 0x3FF), (first + 1, last - 1, 0, 0x3FF), (last, last, 0, end)]
    for lead_low, lead_high, trail_low, trail_high in spans:
        for lead in _hex_range(0xD800 + lead_low, 0xD800 + lead_high, 4):
            for trail in _hex_range(0xDC00 + trail_low, 0xDC00 + trail_high, 4):
                yield rf"\\u{lead}\\u{trail}"


def _hex_range(low: int, high: int, width: int) -> list[str]:
    """Patterns of the numbers low … high in `width` hexadecimal digits of either case."""
    if low > high:
        return []
    if width == 0:
        return [""]
    unit = 16 ** (width - 1)
    first, last = low // unit, high // unit
    if first == last:
        return [_hex_digits(first, first) + rest for rest in _hex_range(low % unit, high % unit, width - 1)]
    patterns: list[str] = []
    if low % unit:
        patterns += [_hex_digits(first, first) + rest for rest in _hex_range(low % unit, unit - 1, width - 1)]
        first += 1
    tail: list[str] = []
    if high % unit != unit - 1:
        tail = [_hex_digits(last, last) + rest for rest in _hex_range(0, high % unit, width - 1)]
        last -= 1
    if first <= last:
        patterns.append(_hex_digits(first, last) + "[0-9A-Fa-f]" * (width - 1))
    return patterns + tail


def _hex_digits(low: int, high: int) -> str:
    digits = "".join(f"{digit:X}" for digit in range(low, high + 1))
    both_cases = digits + "".join(digit.lower() for digit in digits if digit.isalpha())
    return both_cases if len(both_cases) == 1 else f"[{both_cases}]"
