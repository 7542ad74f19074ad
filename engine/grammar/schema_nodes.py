"""The parts of a JSON schema: its schemas, their constraints, and exact numbers. Knows no keyword."""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from engine.grammar.spec import GrammarError

PARAM = "guided_json"
TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
NUMBER_EXPONENT_MAX = 400


def refusal(path: str, reason: str) -> GrammarError:
    return GrammarError(PARAM, f"the schema cannot be enforced at {path or '#'}: {reason}")


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A schema of the document. Compared by identity; `index` is its position in reading order."""

    value: Any
    base: str
    path: str
    index: int


@dataclass(frozen=True, slots=True, eq=False)
class Constraint:
    """One keyword, or several that only have a meaning together. `kind`: what `value` holds."""

    kind: str
    value: Any
    path: str


@dataclass(frozen=True, slots=True)
class Members:
    """`properties`, `patternProperties` and `additionalProperties` of one schema; None constrains nothing.

    `is_ordered` is False when the order of `named` has no meaning."""

    named: dict[str, Node]
    patterned: tuple[tuple[str, Node], ...]
    others: Node | None
    is_ordered: bool = True


@dataclass(frozen=True, slots=True)
class Items:
    """The schemas of an array: by position, and for all later items."""

    first: tuple[Node, ...]
    others: Node | None


@dataclass(frozen=True, slots=True)
class Contains:
    """Between `low` and `high` items satisfy `node`, or do not satisfy it when `holds` is False."""

    node: Node
    low: int
    high: int | None
    holds: bool = True


def parse(text: str) -> Any:
    """JSON with exact numbers: integers as int, others as Fraction. Raises `GrammarError`."""
    try:
        return json.loads(text, parse_float=_fraction)
    except ValueError as error:
        raise GrammarError(PARAM, f"the schema is not JSON: {error}") from error


def _fraction(digits: str) -> int | Fraction:
    try:
        value = Decimal(digits)
    except InvalidOperation as error:
        raise GrammarError(PARAM, f"the schema holds the number {digits[:40]}, which is beyond every limit") from error
    if value and abs(value.adjusted()) > NUMBER_EXPONENT_MAX:
        raise GrammarError(PARAM, f"the schema holds the number {digits[:40]}: exponents go to {NUMBER_EXPONENT_MAX}")
    return Fraction(value)


def json_type(value: Any) -> str:
    """The name of a value's type in messages."""
    names: dict[type, str] = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
