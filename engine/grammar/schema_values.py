"""Whether a given value satisfies a schema: decides which members of an `enum` its sibling keywords allow. Knows no grammar."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from engine.grammar.formats import format_language
from engine.grammar.patterns import PatternError, search_language
from engine.grammar.regex import Regex, matches
from engine.grammar.schema_keywords import Keywords
from engine.grammar.schema_nodes import Constraint, Contains, Items, Members, Node, refusal

Literal = tuple[Node | Constraint, bool]
"""A schema or a constraint, and whether it must hold or must not."""

Term = tuple[Literal, ...]
"""A conjunction of what must hold (True) or must not (False). Schemas are sorted, so that equal conjunctions are equal."""


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Some property has a name in `names` and a value that satisfies `value`."""

    names: Regex
    value: Term


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return names.get(type(value), "number")


def equality_key(value: Any) -> Any:
    """A hashable key, equal exactly for equal JSON values: 1 and 1.0 are, 1 and true are not."""
    kind = type_of(value)
    if kind == "array":
        return (kind, tuple(equality_key(item) for item in value))
    if kind == "object":
        return (kind, frozenset((name, equality_key(item)) for name, item in value.items()))
    return (kind, Fraction(value) if kind == "number" else value)


class Values:
    """Tests values against the schemas of one document."""

    def __init__(self, keywords: Keywords) -> None:
        self._keywords = keywords
        self._tests: dict[str, Callable[[str, Any, Any], Any]] = {
            "number": self._number,
            "string": self._string,
            "array": self._array,
            "object": self._object,
        }

    def holds(self, literal: Literal, value: Any) -> bool:
        formula, positive = literal
        if isinstance(formula, Node):
            return self._node(formula, value) is positive
        return self._constraint(formula, value) is positive

    def _node(self, node: Node, value: Any) -> bool:
        return all(self._constraint(constraint, value) for constraint in self._keywords.of(node))

    def _constraint(self, constraint: Constraint, value: Any) -> bool:
        kind, expected = constraint.kind, constraint.value
        if kind in _GENERAL:
            return self._general(kind, expected, value)
        if TYPE_OF_KIND[kind] != type_of(value):
            return True
        try:
            return bool(self._tests[TYPE_OF_KIND[kind]](kind, expected, value))
        except PatternError as error:
            raise refusal(constraint.path, f"a pattern with {error}") from error

    def _general(self, kind: str, expected: Any, value: Any) -> bool:
        if kind == "never":
            return False
        if kind == "type":
            is_integer = "integer" in expected and type_of(value) == "number" and Fraction(value).denominator == 1
            return is_integer or type_of(value) in expected
        if kind == "enum":
            return equality_key(value) in {equality_key(member) for member in expected}
        if kind == "not":
            return not self._node(expected, value)
        if kind == "if":
            test, then, otherwise = expected
            return self._node(then if self._node(test, value) else otherwise, value)
        results = [self._node(node, value) for node in expected]
        return {"all": all(results), "any": any(results), "one": sum(results) == 1}[kind]

    def _number(self, kind: str, expected: Any, value: Any) -> Any:
        if kind == "whole":
            return Fraction(value).denominator == 1
        if kind == "multiple":
            return (Fraction(value) / expected).denominator == 1
        limit, is_exclusive = expected
        if kind == "low":
            return value > limit or (value == limit and not is_exclusive)
        return value < limit or (value == limit and not is_exclusive)

    def _string(self, kind: str, expected: Any, value: str) -> Any:
        if kind == "min_length":
            return len(value) >= expected
        if kind == "max_length":
            return len(value) <= expected
        if kind == "pattern":
            return matches(search_language(expected), value)
        language = format_language(expected)
        return language is None or matches(language, value)

    def _array(self, kind: str, expected: Any, value: list[Any]) -> Any:
        if kind == "min_items":
            return len(value) >= expected
        if kind == "max_items":
            return len(value) <= expected
        if kind == "unique":
            return len({equality_key(item) for item in value}) == len(value)
        if kind == "contains":
            assert isinstance(expected, Contains)
            num_matching = sum(self._node(expected.node, item) is expected.holds for item in value)
            return expected.low <= num_matching and (expected.high is None or num_matching <= expected.high)
        if kind == "at":
            index, node = expected
            return index < len(value) and not self._node(node, value[index])
        assert isinstance(expected, Items)
        nodes = itertools.chain(expected.first, itertools.repeat(expected.others))
        return all(node is None or self._node(node, item) for node, item in zip(nodes, value, strict=False))

    def _object(self, kind: str, expected: Any, value: dict[str, Any]) -> Any:
        if kind == "required":
            return expected in value
        if kind == "min_members":
            return len(value) >= expected
        if kind == "max_members":
            return len(value) <= expected
        if kind == "names":
            return all(self._node(expected, name) for name in value)
        if kind == "dependent":
            return expected[0] not in value or self._node(expected[1], value)
        if kind == "member":
            return expected[0] in value and self.holds(expected[1], value[expected[0]])
        if kind == "pair":
            return any(matches(expected.names, k) and all(self.holds(e, v) for e in expected.value) for k, v in value.items())
        assert isinstance(expected, Members)
        return all(self._node(node, item) for name, item in value.items() for node in nodes_of(expected, name))


def nodes_of(members: Members, name: str) -> list[Node]:
    """The schemas that the value of a property must satisfy. Raises `PatternError`."""
    nodes = [members.named[name]] if name in members.named else []
    nodes += [node for pattern, node in members.patterned if matches(search_language(pattern), name)]
    if not nodes and members.others is not None:
        nodes = [members.others]
    return nodes


_GENERAL = frozenset({"never", "type", "enum", "not", "if", "all", "any", "one"})
TYPE_OF_KIND = {
    **dict.fromkeys(("low", "high", "multiple", "whole"), "number"),
    **dict.fromkeys(("min_length", "max_length", "pattern", "format"), "string"),
    **dict.fromkeys(("min_items", "max_items", "unique", "contains", "items", "at"), "array"),
    **dict.fromkeys(("required", "min_members", "max_members", "names", "dependent", "members", "member", "pair"), "object"),
}
