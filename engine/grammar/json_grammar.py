"""Writes the shapes of a schema as a Lark grammar of JSON texts. Knows the library's syntax and nothing of schemas' keywords.

White space is restricted to what JSON writers produce: a space beside punctuation, and line breaks with indentation inside
brackets and after commas. With JSON's own rule, weak models wrote blanks for ever: whatever else the schema forbids, one more
blank was always allowed. Every terminal is one JSON token together with the blanks around its punctuation, or one character of
a number (`json_numbers`), so that the library's greedy lexer never has to choose. Rules are kept as data until the end, when
those that can produce no text are removed. So a text can always be completed.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

from engine.grammar.json_containers import ArrayWriter, ObjectWriter
from engine.grammar.json_numbers import NumberWriter
from engine.grammar.lark_rules import Body, Repeated, Rules, Symbol, comma
from engine.grammar.numbers import Numbers
from engine.grammar.regex import literal
from engine.grammar.schema_nodes import PARAM
from engine.grammar.schema_values import Term, type_of
from engine.grammar.shapes import Array, Constants, Object, Shape, Strings
from engine.grammar.spec import GrammarError
from engine.grammar.term_shapes import Shapes

LINE_BREAKS_MAX = 2
INDENT_MAX = 64
REPEATED_MAX = 100_000

_LINE = rf"( ?|(\r?\n){{1,{LINE_BREAKS_MAX}}}[ \t]{{0,{INDENT_MAX}}})"
_PUNCTUATION = {
    "LBRACE": rf"/\{{{_LINE}/",
    "RBRACE": rf"/{_LINE}\}}/",
    "LBRACKET": rf"/\[{_LINE}/",
    "RBRACKET": rf"/{_LINE}\]/",
    "COMMA": rf"/ ?,{_LINE}/",
    "COLON": r"/ ?: ?/",
}


class JsonGrammar:
    """The grammar of one term. An instance writes one."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._rules = Rules()
        self._numbers = NumberWriter(self._rules)
        self._rule_names: dict[Term, str] = {}
        self._pending: deque[tuple[str, Term]] = deque()

    def write(self, term: Term) -> str:
        """Raises `GrammarError` for a term that nothing satisfies, and beyond `RULES_MAX`."""
        start = self._value(term)
        while self._pending:
            name, next_term = self._pending.popleft()
            self._rules.rules[name] = [self._shape(shape) for shape in self._shapes.of(next_term)]
        self._numbers.write_bodies()
        self._rules.drop_unproductive()
        if not self._rules.rules.get(start):
            raise GrammarError(PARAM, "the schema cannot be satisfied by any text")
        return self._rules.text(start, _PUNCTUATION)

    def _value(self, term: Term) -> str:
        """The rule of a term; its bodies are written later."""
        if term not in self._rule_names:
            name = self._rules.rule([])
            self._rule_names[term] = name
            self._pending.append((name, term))
        return self._rule_names[term]

    def _shape(self, shape: Shape) -> Body:
        if isinstance(shape, Constants):
            return (self._rules.rule([self._constant(value) for value in shape.values]),)
        if isinstance(shape, Strings):
            return (self._rules.string(shape.language),)
        if isinstance(shape, Numbers):
            return (self._numbers.rule(shape),)
        if isinstance(shape, Object):
            members = ObjectWriter(self._rules, self._value, shape)
            return ("LBRACE", members.start(), "RBRACE")
        return ("LBRACKET", self._array(shape), "RBRACKET")

    def _constant(self, value: Any) -> Body:
        """One value; its properties are in the schema's order."""
        kind = type_of(value)
        if kind == "string":
            return (self._rules.string(literal(value)),)
        if kind == "number":
            return (self._numbers.constant(value),)
        body: list[Symbol] = []
        if kind == "array":
            for item in value:
                body += [*comma(body), *self._constant(item)]
            return ("LBRACKET", *body, "RBRACKET")
        if kind == "object":
            for name, item in value.items():
                body += [*comma(body), self._rules.string(literal(name)), "COLON", *self._constant(item)]
            return ("LBRACE", *body, "RBRACE")
        return (self._rules.terminals.name(f'"{json.dumps(value)}"', "K"),)

    def _array(self, shape: Array) -> str:
        if shape.unique is not None:
            return self._unique(shape)
        if shape.counted:
            return ArrayWriter(self._rules, self._value, shape).start()
        rest = self._tail(shape)
        for position in range(len(shape.first) - 1, -1, -1):
            bodies: list[Body] = [()] if shape.low <= position else []
            bodies.append((*comma(position), self._value(shape.first[position]), rest))
            rest = self._rules.rule(bodies)
        return rest

    def _tail(self, shape: Array) -> str:
        """What follows the items by position, any number of equal ones."""
        position = len(shape.first)
        low = max(0, shape.low - position)
        high = None if shape.high is None else shape.high - position
        if max(low, high or 0) > REPEATED_MAX:
            raise GrammarError(PARAM, f"the schema has minItems or maxItems above {REPEATED_MAX}")
        if high == 0:
            return self._rules.rule([()])
        item = self._value(shape.others)
        if position:
            return self._rules.rule([(Repeated(("COMMA", item), low, high),)])
        rest = Repeated(("COMMA", item), max(0, low - 1), None if high is None else high - 1)
        return self._rules.rule([(), (item, rest)] if low == 0 else [(item, rest)])

    def _unique(self, shape: Array) -> str:
        """Items from a list of values, each at most once."""
        assert shape.unique is not None
        high = len(shape.unique) if shape.high is None else min(shape.high, len(shape.unique))
        if high < shape.low:
            return self._rules.rule([])
        items = [self._rules.rule([self._constant(value)]) for value in shape.unique]
        return self._rules.each_once(items, (), f"bit_count_ge(_, {shape.low})" if shape.low else "", high)
