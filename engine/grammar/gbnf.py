"""Reads grammars in GBNF (the notation of llama.cpp, an EBNF with `::=`) and writes them for the library. Knows no schema.

Every character becomes its own terminal: the library's lexer takes the longest terminal that matches, and with single
characters there is no longer one, so the grammar keeps its meaning.
"""

from __future__ import annotations

from engine.grammar import char_sets
from engine.grammar.char_sets import CharSet
from engine.grammar.regex import Chars
from engine.grammar.terminals import Terminals

RULES_MAX = 5_000
REPEAT_MAX = 10_000
NESTING_MAX = 60
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\", "[": "[", "]": "]", "-": "-", "^": "^", "/": "/"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class GbnfError(ValueError):
    """The grammar cannot be read; the message says where."""


def gbnf_to_lark(text: str) -> str:
    """The same grammar as Lark text, started from `root`. Raises `GbnfError`."""
    return _Reader(text).read()


class _Reader:
    """Recursive descent, writing output while reading."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._pos = 0
        self._depth = 0
        self._terminals = Terminals()
        self._names: dict[str, str] = {}
        self._rules: dict[str, str] = {}

    def read(self) -> str:
        self._skip_blanks(lines=True)
        while self._pos < len(self._text):
            self._rule()
            self._skip_blanks(lines=True)
        missing = [name for name in self._names if name not in self._rules]
        if "root" not in self._rules:
            raise self._error("no rule named root")
        if missing:
            raise self._error(f"the rule {missing[0]} is used and not defined")
        lines = [f"{self._names[name]}: {body}" for name, body in self._rules.items()]
        return "\n".join([f"start: {self._names['root']}", *lines, *self._terminals.lines()]) + "\n"

    def _error(self, problem: str) -> GbnfError:
        line = self._text.count("\n", 0, self._pos) + 1
        return GbnfError(f"{problem} (line {line})")

    def _accept(self, token: str) -> bool:
        if self._text.startswith(token, self._pos):
            self._pos += len(token)
            return True
        return False

    def _skip_blanks(self, *, lines: bool) -> None:
        """Skip blanks and comments, and with `lines` the ends of lines."""
        while self._pos < len(self._text):
            character = self._text[self._pos]
            if character == "#":
                end = self._text.find("\n", self._pos)
                self._pos = end if end >= 0 else len(self._text)
            elif character in " \t" or (lines and character in "\r\n"):
                self._pos += 1
            else:
                return

    def _name(self) -> str:
        start = self._pos
        while self._pos < len(self._text) and (self._text[self._pos].isalnum() or self._text[self._pos] in "-_"):
            self._pos += 1
        if start == self._pos:
            raise self._error(f"{self._text[start : start + 1]!r} where a name should be")
        return self._text[start : self._pos]

    def _reference(self, name: str) -> str:
        if len(self._names) > RULES_MAX:
            raise self._error(f"more than {RULES_MAX} rules")
        return self._names.setdefault(name, f"r{len(self._names)}")

    def _rule(self) -> None:
        name = self._name()
        self._skip_blanks(lines=False)
        if not self._accept("::="):
            raise self._error(f"the rule {name} without ::=")
        if name in self._rules:
            raise self._error(f"the rule {name} is defined twice")
        self._reference(name)
        self._skip_blanks(lines=True)
        self._rules[name] = self._alternatives(nested=False)
        if self._pos < len(self._text) and self._text[self._pos] not in "\r\n":
            raise self._error(f"{self._text[self._pos]!r} is out of place")

    def _alternatives(self, *, nested: bool) -> str:
        bodies = [self._sequence(nested=nested)]
        while True:
            before = self._pos
            self._skip_blanks(lines=True)  # a line may begin with |
            if not self._accept("|"):
                self._pos = before
                return " | ".join(bodies)
            self._skip_blanks(lines=True)
            bodies.append(self._sequence(nested=nested))

    def _sequence(self, *, nested: bool) -> str:
        elements: list[str] = []
        while True:
            self._skip_blanks(lines=nested)
            if self._pos >= len(self._text) or self._text[self._pos] in "|)\r\n":
                return " ".join(elements) or '""'
            elements.append(self._quantified(self._element(), nested=nested))

    def _element(self) -> str:
        if self._accept('"'):
            return self._string()
        if self._accept("["):
            return self._char(self._class())
        if self._accept("."):
            return self._char(char_sets.ANY)
        if self._accept("("):
            self._depth += 1
            if self._depth > NESTING_MAX:
                raise self._error(f"groups nested more than {NESTING_MAX} deep")
            inner = self._alternatives(nested=True)
            if not self._accept(")"):
                raise self._error("an unclosed (")
            self._depth -= 1
            return f"({inner})"
        return self._reference(self._name())

    def _char(self, members: CharSet) -> str:
        return self._terminals.name(self._terminals.text(Chars(members)))

    def _string(self) -> str:
        parts: list[str] = []
        while not self._accept('"'):
            parts.append(self._char(char_sets.of(self._character())))
        return f"({' '.join(parts)})" if parts else '""'

    def _class(self) -> CharSet:
        negated = self._accept("^")
        members: list[CharSet] = []
        while not self._accept("]"):
            first = last = self._character()
            if self._text.startswith("-", self._pos) and not self._text.startswith("-]", self._pos):
                self._pos += 1
                last = self._character()
            if last < first:
                raise self._error("a range of characters that runs backwards")
            members.append(char_sets.chars((ord(first), ord(last))))
        characters = char_sets.union(*members)
        return char_sets.complement(characters) if negated else characters

    def _character(self) -> str:
        if self._pos >= len(self._text) or self._text[self._pos] in "\r\n":
            raise self._error("an unclosed string or class")
        character = self._text[self._pos]
        self._pos += 1
        if character != "\\":
            return character
        escape = self._text[self._pos : self._pos + 1]
        self._pos += 1
        if escape in _HEX_DIGITS:
            digits = self._text[self._pos : self._pos + _HEX_DIGITS[escape]]
            self._pos += len(digits)
            try:
                if digits.isascii() and digits.isalnum():  # `int` alone accepts signs, blanks, underscores and other digits
                    return chr(int(digits, 16))
            except (ValueError, OverflowError):
                pass
            raise self._error(f"the escape \\{escape}{digits}")
        if escape not in _ESCAPES or not escape:
            raise self._error(f"the unknown escape \\{escape}")
        return _ESCAPES[escape]

    def _quantified(self, element: str, *, nested: bool) -> str:
        while True:
            self._skip_blanks(lines=nested)
            sign = self._text[self._pos : self._pos + 1]
            if sign == "{":
                bounds = self._bounds()
                element = f"({element}){bounds}" if bounds else '""'
            elif sign and sign in "*+?":
                element = f"({element}){sign}"
                self._pos += 1
            else:
                return element

    def _bounds(self) -> str:
        """The bounds as the library writes them; empty for zero repetitions, which the library cannot write."""
        end = self._text.find("}", self._pos)
        low, comma, high = self._text[self._pos + 1 : end].partition(",")
        numbers = [part.strip() for part in (low, high) if part.strip()]
        if end < 0 or not numbers or not all(map(_is_count, numbers)):
            raise self._error(f"a malformed repetition, or one of more than {REPEAT_MAX}")
        self._pos = end + 1
        least, most = int(low.strip() or "0"), int(high) if high.strip() else None
        if not comma:
            most = least
        if most is None:
            return f"{{{least},}}"
        if most < least:
            raise self._error("a repetition whose limits run backwards")
        return f"{{{least},{most}}}" if most else ""


def _is_count(digits: str) -> bool:
    return digits.isascii() and digits.isdigit() and len(digits) < 10 and int(digits) <= REPEAT_MAX
