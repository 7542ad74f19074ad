"""Takes a conjunction of schemas apart into cases. A case has only plain constraints, and satisfying any one case suffices.

The method is that of a tableau: `allOf`, `$ref` and negations are opened, `anyOf`, `oneOf`, `if` and the negation of a schema
split the case. Negations are carried as negative literals, so that `not`, `oneOf` and `else` are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from engine.grammar.patterns import PatternError, search_language
from engine.grammar.regex import Regex, alt, both, literal, no
from engine.grammar.schema_document import Document
from engine.grammar.schema_nodes import PARAM, TYPES, Constraint, Contains, Items, Members, Node, refusal
from engine.grammar.schema_values import TYPE_OF_KIND, Literal, Pair, Term, Values, type_of
from engine.grammar.spec import GrammarError

SPLITS_MAX = 20_000
CASES_MAX = 2_000


@dataclass(frozen=True, slots=True)
class Case:
    """One way to satisfy a term: a value of one of `types` with every fact; or, when not None, one of `values`."""

    types: frozenset[str]
    facts: tuple[tuple[Constraint, bool], ...]
    values: tuple[Any, ...] | None = None

    def of_type(self, name: str) -> list[tuple[Constraint, bool]]:
        return [(c, positive) for c, positive in self.facts if _type_of(c) in (name, None)]


def term(literals: Iterable[Literal]) -> Term:
    return tuple(sorted(dict.fromkeys(literals), key=_order))


def _order(each: Literal) -> tuple[int, bool]:
    return (each[0].index if isinstance(each[0], Node) else -1, each[1])


def positive(nodes: Iterable[Node]) -> Term:
    return term((node, True) for node in nodes)


def _type_of(constraint: Constraint) -> str | None:
    return TYPE_OF_KIND.get(constraint.kind)


@dataclass(frozen=True, slots=True, eq=False)
class OneOf:
    """A choice whose alternatives are written when it is made: what is known by then separates most branches."""

    nodes: tuple[Node, ...]


class _Path:
    """One branch of the tableau while it grows."""

    __slots__ = ("choices", "facts", "literals", "pending", "seen", "types")

    def __init__(self, literals: Iterable[Literal]) -> None:
        self.literals: list[Literal] = list(literals)
        self.pending: list[Literal] = self.literals[::-1]
        self.seen: set[Literal] = set()
        self.facts: dict[tuple[Constraint, bool], None] = {}
        self.types: frozenset[str] = TYPES
        self.choices: list[list[list[Literal]] | OneOf] = []

    def taking(self, index: int, literals: list[Literal]) -> _Path:
        """A copy in which the choice `index` has been made."""
        path = _Path(())
        path.literals = [*self.literals, *literals]
        path.pending = list(reversed(literals))
        path.seen, path.facts, path.types = set(self.seen), dict(self.facts), self.types
        path.choices = self.choices[:index] + self.choices[index + 1 :]
        return path


class Cases:
    """Cases of the terms of one document. `is_empty` says when no value can satisfy a term; `names_of` returns the strings that
    satisfy one."""

    def __init__(self, document: Document, is_empty: Callable[[Term], bool], names_of: Callable[[Term], Regex]) -> None:
        self._document = document
        self._is_empty = is_empty
        self._names_of = names_of
        self._values = Values(document)
        self._known: dict[Term, tuple[Case, ...]] = {}
        self._wholes: dict[Constraint, Constraint] = {}
        self._type_facts: dict[frozenset[str], Constraint] = {}
        self._num_splits = 0

    def of(self, wanted: Term) -> tuple[Case, ...]:
        """Raises `GrammarError` for what cannot be enforced, and when the cases multiply beyond `CASES_MAX`."""
        if wanted not in self._known:
            found: dict[tuple[object, ...], Case] = {}
            for case in self._open(_Path(wanted)):
                key = (case.types, frozenset(case.facts), None if case.values is None else id(case))
                found.setdefault(key, case)
                if len(found) > CASES_MAX:
                    path = wanted[0][0].path if wanted else "#"
                    raise refusal(path, f"alternatives that combine into more than {CASES_MAX} cases")
            self._known[wanted] = tuple(found.values())
        return self._known[wanted]

    def holds(self, wanted: Term, value: Any) -> bool:
        return all(self._values.holds(each, value) for each in wanted)

    def _open(self, path: _Path) -> Iterator[Case]:
        while path.pending:
            literal_ = path.pending.pop()
            if literal_ in path.seen:
                continue
            path.seen.add(literal_)
            if not self._take(path, *literal_) or not path.types:
                return
        listed = next((c.value for c, holds in path.facts if c.kind == "enum" and holds), None)
        if listed is not None:
            values = tuple(v for v in listed if type_of(v) in path.types and self._all_hold(path.literals, v))
            if values:
                yield Case(path.types, tuple(path.facts), values)
            return
        if not path.choices:
            yield Case(path.types, tuple(path.facts))
            return
        index = min(range(len(path.choices)), key=lambda i: _width(path.choices[i]))
        choice = path.choices[index]
        for literals in self._one_of(choice.nodes, path) if isinstance(choice, OneOf) else choice:
            self._num_splits += 1
            if self._num_splits > SPLITS_MAX:
                raise GrammarError(PARAM, f"the schema has alternatives that combine in more than {SPLITS_MAX} ways")
            yield from self._open(path.taking(index, literals))

    def _all_hold(self, literals: list[Literal], value: Any) -> bool:
        return all(self._values.holds(each, value) for each in literals)

    def _take(self, path: _Path, part: Node | Constraint, holds: bool) -> bool:
        """Open one literal into the path; False when nothing satisfies it."""
        if isinstance(part, Node):
            constraints = self._document.constraints(part)
            if holds:
                path.pending.extend((constraint, True) for constraint in reversed(constraints))
                return True
            return self._choose(path, [[(constraint, False)] for constraint in constraints])
        if part.kind in ("all", "any", "one", "not", "if", "dependent", "never", "type"):
            return self._compound(path, part, holds)
        kind = _type_of(part)
        if not holds:
            if kind is not None:
                path.types &= {kind}
            alternatives = self._negated(part)
            if alternatives is not None:
                return self._choose(path, alternatives)
        path.facts[(part, holds)] = None
        return True

    def _choose(self, path: _Path, alternatives: list[list[Literal]]) -> bool:
        if len(alternatives) == 1:
            path.literals.extend(alternatives[0])
            path.pending.extend(reversed(alternatives[0]))
        elif alternatives:
            path.choices.append(alternatives)
        return bool(alternatives)

    def _compound(self, path: _Path, part: Constraint, holds: bool) -> bool:
        kind, value = part.kind, part.value
        if kind == "never":
            return not holds
        if kind == "type":
            return self._type(path, part, holds)
        if kind == "not":
            return self._choose(path, [[(value, not holds)]])
        if kind == "if":
            test, then, otherwise = value
            return self._choose(path, [[(test, True), (then, holds)], [(test, False), (otherwise, holds)]])
        if kind == "dependent":
            return self._choose(path, _dependent(part, holds))
        if kind == "one":
            if not holds:
                return self._choose(path, _none_or_two(value))
            path.choices.append(OneOf(tuple(value)))
            return True
        if (kind == "all") is holds:
            return self._choose(path, [[(node, holds) for node in value]])
        return self._choose(path, [[(node, holds)] for node in value])

    def _type(self, path: _Path, part: Constraint, holds: bool) -> bool:
        names: frozenset[str] = part.value
        listed = (names & TYPES) | ({"number"} if "integer" in names else frozenset())
        only_whole = "integer" in names and "number" not in names
        path.types = path.types & listed if holds else path.types - (names & TYPES)
        if only_whole:
            whole = self._wholes.setdefault(part, Constraint("whole", None, part.path))
            path.facts[(whole, holds)] = None
        return bool(path.types)

    def _one_of(self, nodes: tuple[Node, ...], path: _Path) -> Iterator[list[Literal]]:
        """For each branch: the branch, and the negation of every other one that could hold with it, given the path so far."""
        known = (*path.facts, (self._types_of(path), True))
        possible = [node for node in nodes if not self._is_empty((*known, (node, True)))]
        for node in possible:
            others = [
                other for other in possible if other is not node and not self._is_empty((*known, *positive((node, other))))
            ]
            yield [(node, True), *((other, False) for other in others)]

    def _types_of(self, path: _Path) -> Constraint:
        return self._type_facts.setdefault(path.types, Constraint("type", path.types, "#"))

    def _negated(self, part: Constraint) -> list[list[Literal]] | None:
        """Alternatives that together are the opposite of a constraint; None where a negative fact is handled as it is."""
        value = part.value
        if part.kind == "members":
            return self._other_member(part, value)
        if part.kind == "enum":
            return self._other_value(part, value)
        if part.kind == "names":
            names = self._names_of(((value, False),))
            return [[_pair(names, (), part)]]
        if part.kind == "items":
            return _other_item(part, value)
        if part.kind == "contains":
            return _other_count(part, value)
        return None

    def _other_value(self, part: Constraint, values: list[Any]) -> list[list[Literal]] | None:
        """The value is none of these. Arrays and objects among them are excluded as schemas that only they satisfy."""
        nested = [value for value in values if isinstance(value, list | dict) and value]
        if not nested:
            return None
        plain = Constraint("enum", [value for value in values if not (isinstance(value, list | dict) and value)], part.path)
        return [[(plain, False), *((self._document.only(value, part.path), False) for value in nested)]]

    def _other_member(self, part: Constraint, members: Members) -> list[list[Literal]]:
        """The object has a property that breaks the rule for its name."""
        found: list[list[Literal]] = [
            [(Constraint("member", (name, (node, False)), part.path), True)] for name, node in members.named.items()
        ]
        try:
            for pattern, node in members.patterned:
                found.append([_pair(search_language(pattern), ((node, False),), part)])
            if members.others is not None:
                listed = alt(*(literal(name) for name in members.named))
                patterns = (no(search_language(pattern, wide=True)) for pattern, _ in members.patterned)
                found.append([_pair(both(no(listed), *patterns), ((members.others, False),), part)])
        except PatternError as error:
            raise refusal(part.path, f"a pattern with {error}") from error
        return found


def _width(choice: list[list[Literal]] | OneOf) -> int:
    """Sort key: choices with few alternatives are made first, and those that further facts narrow last."""
    return CASES_MAX + len(choice.nodes) if isinstance(choice, OneOf) else len(choice)


def _pair(names: Regex, value: Term, like: Constraint) -> Literal:
    return (Constraint("pair", Pair(names, value), like.path), True)


def _dependent(part: Constraint, holds: bool) -> list[list[Literal]]:
    name, node = part.value
    has = Constraint("required", name, part.path)
    if not holds:
        return [[(has, True), (Constraint("type", frozenset({"object"}), part.path), True), (node, False)]]
    return [[(Constraint("type", frozenset({"object"}), part.path), False)], [(has, False)], [(has, True), (node, True)]]


def _none_or_two(nodes: list[Node]) -> list[list[Literal]]:
    pairs = [[(a, True), (b, True)] for i, a in enumerate(nodes) for b in nodes[i + 1 :]]
    return [[(node, False) for node in nodes], *pairs]  # type: ignore[list-item]


def _other_item(part: Constraint, items: Items) -> list[list[Literal]]:
    """The array has an item that breaks the rule for its position: a fixed position, or any after the first ones."""
    found: list[list[Literal]] = []
    for place, node in enumerate(items.first):
        found.append([(Constraint("at", (place, node), part.path), True)])
    if items.others is not None:
        if items.first:
            raise refusal(part.path, "the negation of an array with items of several kinds")
        found.append([(Constraint("contains", Contains(items.others, 1, None, holds=False), part.path), True)])
    return found


def _other_count(part: Constraint, contains: Contains) -> list[list[Literal]]:
    found: list[list[Literal]] = []
    if contains.low > 0:
        found.append([(Constraint("contains", Contains(contains.node, 0, contains.low - 1, contains.holds), part.path), True)])
    if contains.high is not None:
        found.append(
            [(Constraint("contains", Contains(contains.node, contains.high + 1, None, contains.holds), part.path), True)]
        )
    return found
