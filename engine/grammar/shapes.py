"""The values that satisfy a term, type by type: the form from which grammar rules are written. Knows no grammar syntax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.grammar.numbers import Numbers
from engine.grammar.regex import Regex
from engine.grammar.schema_values import Pair, Term


@dataclass(frozen=True, slots=True)
class Constants:
    """Exactly these values."""

    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Strings:
    """Strings of a language."""

    language: Regex


@dataclass(frozen=True, slots=True)
class Member:
    """A named property. `pairs` are the indices of the required pairs that its name can satisfy."""

    name: str
    value: Term
    required: bool
    pairs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OtherMembers:
    """Properties whose names are in a language and not among the named ones."""

    names: Regex
    value: Term
    pairs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Object:
    """Named properties, in the order of the schema, or in any order when no single `properties` lists them; others anywhere.

    There are `low` to `high` properties, and every pair is satisfied."""

    named: tuple[Member, ...]
    others: tuple[OtherMembers, ...]
    low: int
    high: int | None
    pairs: tuple[Pair, ...]
    any_order: bool


@dataclass(frozen=True, slots=True)
class Counted:
    """Between `low` and `high` items satisfy `value`; where `high` is set, all other items satisfy `opposite`."""

    value: Term
    opposite: Term
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Array:
    """`first` by position, then `others`; `low` to `high` items. `unique` lists values that may each occur once."""

    first: tuple[Term, ...]
    others: Term
    low: int
    high: int | None
    counted: tuple[Counted, ...]
    unique: tuple[Any, ...] | None


Shape = Constants | Numbers | Strings | Object | Array
