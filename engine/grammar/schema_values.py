"""Whether a given value satisfies a schema: decides which members of an `enum` its sibling keywords allow. Knows no grammar."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
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
    """Tests values against the schemas of one document. Where dialects read a pattern differently, `wide` is False to ask
    whether a value holds in every reading, and True to ask whether it holds in some."""

    def __init__(self, keywords: Keywords) -> None:
        self._keywords = keywords
        self._tests: dict[str, Callable[[str, Any, Any, bool], Any]] = {
            "number": self._number,
            "string": self._string,
            "array": self._array,
            "object": self._object,
        }

    def holds(self, literal: Literal, value: Any, *, wide: bool = False) -> bool:
        formula, positive = literal
        in_some = wide is positive  # what holds in no reading is what does not hold in some
        if isinstance(formula, Node):
            return self._node(formula, value, in_some) is positive
        if formula.kind == "whole" and type_of(value) != "number":
            return True  # what is not an integer may have any other type
        return self._constraint(formula, value, in_some) is positive

    def _node(self, node: Node, value: Any, wide: bool) -> bool:
        return all(self._constraint(constraint, value, wide) for constraint in self._keywords.of(node))

    def _constraint(self, constraint: Constraint, value: Any, wide: bool) -> bool:
        kind, expected = constraint.kind, constraint.value
        if kind in _GENERAL:
            return self._general(kind, expected, value, wide)
        if TYPE_OF_KIND[kind] != type_of(value):
            return True
        try:
            return bool(self._tests[TYPE_OF_KIND[kind]](kind, expected, value, wide))
        except PatternError as error:
            raise refusal(constraint.path, f"a pattern with {error}") from error

    def _general(self, kind: str, expected: Any, value: Any, wide: bool) -> bool:
        if kind == "never":
            return False
        if kind == "type":
            is_integer = "integer" in expected and type_of(value) == "number" and Fraction(value).denominator == 1
            return is_integer or type_of(value) in expected
        if kind == "enum":
            return equality_key(value) in {equality_key(member) for member in expected}
        if kind == "not":
            return self.holds((expected, False), value, wide=wide)
        if kind == "if":
            test, then, otherwise = expected
            return (self.holds((test, False), value, wide=wide) or self._node(then, value, wide)) and (
                self._node(test, value, wide) or self._node(otherwise, value, wide)
            )
        if kind == "one":
            at_least, at_most = self._counts([(node, True) for node in expected], itertools.repeat(value), wide)
            return at_least >= 1 >= at_most
        quantifier = all if kind == "all" else any
        return quantifier(self._node(node, value, wide) for node in expected)

    def _counts(self, literals: Iterable[Literal], values: Iterable[Any], wide: bool) -> tuple[int, int]:
        """How many literals hold for the value beside them: as a count that must not be too small, and one not too large."""
        pairs = list(zip(literals, values, strict=False))
        at_least, at_most = (sum(self.holds(one, value, wide=w) for one, value in pairs) for w in (wide, not wide))
        return at_least, at_most

    def _number(self, kind: str, expected: Any, value: Any, _wide: bool) -> Any:
        if kind == "whole":
            return Fraction(value).denominator == 1
        if kind == "multiple":
            return (Fraction(value) / expected).denominator == 1
        limit, is_exclusive = expected
        if kind == "low":
            return value > limit or (value == limit and not is_exclusive)
        return value < limit or (value == limit and not is_exclusive)

    def _string(self, kind: str, expected: Any, value: str, wide: bool) -> Any:
        if kind == "min_length":
            return len(value) >= expected
        if kind == "max_length":
            return len(value) <= expected
        if kind == "pattern":
            return matches(search_language(expected, wide=wide), value)
        language = format_language(expected)
        return language is None or matches(language, value)

    def _array(self, kind: str, expected: Any, value: list[Any], wide: bool) -> Any:
        if kind == "min_items":
            return len(value) >= expected
        if kind == "max_items":
            return len(value) <= expected
        if kind == "unique":
            return len({equality_key(item) for item in value}) == len(value)
        if kind == "contains":
            assert isinstance(expected, Contains)
            at_least, at_most = self._counts(itertools.repeat((expected.node, expected.holds)), value, wide)
            return expected.low <= at_least and (expected.high is None or at_most <= expected.high)
        if kind == "at":
            index, node = expected
            return index < len(value) and self.holds((node, False), value[index], wide=wide)
        assert isinstance(expected, Items)
        nodes = itertools.chain(expected.first, itertools.repeat(expected.others))
        return all(node is None or self._node(node, item, wide) for node, item in zip(nodes, value, strict=False))

    def _object(self, kind: str, expected: Any, value: dict[str, Any], wide: bool) -> Any:
        if kind == "required":
            return expected in value
        if kind == "min_members":
            return len(value) >= expected
        if kind == "max_members":
            return len(value) <= expected
        if kind == "names":
            return all(self._node(expected, name, wide) for name in value)
        if kind == "dependent":
            return expected[0] not in value or self._node(expected[1], value, wide)
        if kind == "member":
            return expected[0] in value and self.holds(expected[1], value[expected[0]], wide=wide)
        if kind == "pair":
            return any(
                matches(expected.names, name) and all(self.holds(one, item, wide=wide) for one in expected.value)
                for name, item in value.items()
            )
        assert isinstance(expected, Members)
        return all(self._node(node, item, wide) for name, item in value.items() for node in nodes_of(expected, name, wide=wide))


def nodes_of(members: Members, name: str, *, wide: bool = False) -> list[Node]:
    """The schemas that the value of a property must satisfy: those of some reading of the patterns, or with `wide` those of
    every reading. Raises `PatternError`."""
    nodes = [members.named[name]] if name in members.named else []
    nodes += [node for pattern, node in members.patterned if matches(search_language(pattern, wide=not wide), name)]
    is_other = not any(matches(search_language(pattern, wide=wide), name) for pattern, _ in members.patterned)
    if members.others is not None and name not in members.named and is_other:
        nodes.append(members.others)
    return nodes


_GENERAL = frozenset({"never", "type", "enum", "not", "if", "all", "any", "one"})
TYPE_OF_KIND = {
    **dict.fromkeys(("low", "high", "multiple", "whole"), "number"),
    **dict.fromkeys(("min_length", "max_length", "pattern", "format"), "string"),
    **dict.fromkeys(("min_items", "max_items", "unique", "contains", "items", "at"), "array"),
    **dict.fromkeys(("required", "min_members", "max_members", "names", "dependent", "members", "member", "pair"), "object"),
}
