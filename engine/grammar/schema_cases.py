"""Splits a conjunction of schemas into cases. A case has only plain constraints, and satisfying any one case suffices.

The method is that of a tableau: `allOf`, `$ref` and negations are expanded, `anyOf`, `oneOf`, `if` and the negation of a schema
split the branch. Negations are kept as negative literals, so that `not`, `oneOf` and `else` are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from engine.grammar.patterns import PatternError, search_language
from engine.grammar.regex import Regex, alt, complement, intersection, literal
from engine.grammar.schema_keywords import Keywords
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
        return [(c, holds) for c, holds in self.facts if _type_of(c) in (name, None)]


def make_term(literals: Iterable[Literal]) -> Term:
    return tuple(sorted(dict.fromkeys(literals), key=_order))


def _order(literal: Literal) -> tuple[int, bool]:
    return (literal[0].index if isinstance(literal[0], Node) else -1, literal[1])


def conjunction(nodes: Iterable[Node]) -> Term:
    return make_term((node, True) for node in nodes)


def _type_of(constraint: Constraint) -> str | None:
    return TYPE_OF_KIND.get(constraint.kind)


@dataclass(frozen=True, slots=True, eq=False)
class OneOf:
    """A choice whose alternatives are computed when it is made: the facts known by then separate most branches."""

    nodes: tuple[Node, ...]


class _Branch:
    """One branch of the tableau while it grows."""

    __slots__ = ("choices", "expanded", "facts", "literals", "pending", "types")

    def __init__(self, literals: Iterable[Literal]) -> None:
        self.literals: list[Literal] = list(literals)
        self.pending: list[Literal] = self.literals[::-1]
        self.expanded: set[Literal] = set()
        self.facts: dict[tuple[Constraint, bool], None] = {}
        self.types: frozenset[str] = TYPES
        self.choices: list[list[list[Literal]] | OneOf] = []

    def with_choice(self, index: int, literals: list[Literal]) -> _Branch:
        """A copy in which the choice `index` has been made."""
        branch = _Branch(())
        branch.literals = [*self.literals, *literals]
        branch.pending = list(reversed(literals))
        branch.expanded, branch.facts, branch.types = set(self.expanded), dict(self.facts), self.types
        branch.choices = self.choices[:index] + self.choices[index + 1 :]
        return branch


class Cases:
    """Cases of the terms of one document. `is_empty`: whether no value can satisfy a term; `names_of` returns the strings that
    satisfy one."""

    def __init__(self, keywords: Keywords, is_empty: Callable[[Term], bool], names_of: Callable[[Term], Regex]) -> None:
        self._keywords = keywords
        self._is_empty = is_empty
        self._names_of = names_of
        self._values = Values(keywords)
        self._cache: dict[Term, tuple[Case, ...]] = {}
        self._integer_constraints: dict[Constraint, Constraint] = {}
        self._type_facts: dict[frozenset[str], Constraint] = {}
        self._num_splits = 0

    def of(self, term: Term) -> tuple[Case, ...]:
        """Raises `GrammarError` for what cannot be enforced, and when the cases multiply beyond `CASES_MAX`."""
        if term not in self._cache:
            cases: dict[tuple[object, ...], Case] = {}
            for case in self._expand_branch(_Branch(term)):
                key = (case.types, frozenset(case.facts), None if case.values is None else id(case))
                cases.setdefault(key, case)
                if len(cases) > CASES_MAX:
                    path = term[0][0].path if term else "#"
                    raise refusal(path, f"alternatives that combine into more than {CASES_MAX} cases")
            self._cache[term] = tuple(cases.values())
        return self._cache[term]

    def _expand_branch(self, branch: _Branch) -> Iterator[Case]:
        while branch.pending:
            literal_ = branch.pending.pop()
            if literal_ in branch.expanded:
                continue
            branch.expanded.add(literal_)
            if not self._expand_literal(branch, *literal_) or not branch.types:
                return
        listed = next((c.value for c, holds in branch.facts if c.kind == "enum" and holds), None)
        if listed is not None:
            values = tuple(v for v in listed if type_of(v) in branch.types and self._all_hold(branch.literals, v))
            if values:
                yield Case(branch.types, tuple(branch.facts), values)
            return
        if not branch.choices:
            yield Case(branch.types, tuple(branch.facts))
            return
        index = min(range(len(branch.choices)), key=lambda i: _choice_order(branch.choices[i]))
        choice = branch.choices[index]
        for literals in self._one_of(choice.nodes, branch) if isinstance(choice, OneOf) else choice:
            self._num_splits += 1
            if self._num_splits > SPLITS_MAX:
                raise GrammarError(PARAM, f"the schema has alternatives that combine in more than {SPLITS_MAX} ways")
            yield from self._expand_branch(branch.with_choice(index, literals))

    def _all_hold(self, literals: list[Literal], value: Any) -> bool:
        return all(self._values.holds(literal, value) for literal in literals)

    def _expand_literal(self, branch: _Branch, formula: Node | Constraint, holds: bool) -> bool:
        """Expand one literal into the branch; False when nothing satisfies it."""
        if isinstance(formula, Node):
            constraints = self._keywords.of(formula)
            if holds:
                branch.pending.extend((constraint, True) for constraint in reversed(constraints))
                return True
            return self._add_choice(branch, [[(constraint, False)] for constraint in constraints])
        if formula.kind in ("all", "any", "one", "not", "if", "dependent", "never", "type"):
            return self._compound(branch, formula, holds)
        kind = _type_of(formula)
        if not holds:
            if kind is not None and formula.kind != "whole":  # what is not an integer may have any other type
                branch.types &= {kind}
            alternatives = self._negated(formula)
            if alternatives is not None:
                return self._add_choice(branch, alternatives)
        branch.facts[(formula, holds)] = None
        return True

    def _add_choice(self, branch: _Branch, alternatives: list[list[Literal]]) -> bool:
        if len(alternatives) == 1:
            branch.literals.extend(alternatives[0])
            branch.pending.extend(reversed(alternatives[0]))
        elif alternatives:
            branch.choices.append(alternatives)
        return bool(alternatives)

    def _compound(self, branch: _Branch, constraint: Constraint, holds: bool) -> bool:
        kind, value = constraint.kind, constraint.value
        if kind == "never":
            return not holds
        if kind == "type":
            return self._type(branch, constraint, holds)
        if kind == "not":
            return self._add_choice(branch, [[(value, not holds)]])
        if kind == "if":
            test, then, otherwise = value
            return self._add_choice(branch, [[(test, True), (then, holds)], [(test, False), (otherwise, holds)]])
        if kind == "dependent":
            return self._add_choice(branch, _dependent(constraint, holds))
        if kind == "one":
            if not holds:
                return self._add_choice(branch, _none_or_two(value))
            branch.choices.append(OneOf(tuple(value)))
            return True
        if (kind == "all") is holds:
            return self._add_choice(branch, [[(node, holds) for node in value]])
        return self._add_choice(branch, [[(node, holds)] for node in value])

    def _type(self, branch: _Branch, constraint: Constraint, holds: bool) -> bool:
        names: frozenset[str] = constraint.value
        listed = (names & TYPES) | ({"number"} if "integer" in names else frozenset())
        only_whole = "integer" in names and "number" not in names
        branch.types = branch.types & listed if holds else branch.types - (names & TYPES)
        if only_whole:
            integer_constraint = self._integer_constraints.setdefault(constraint, Constraint("whole", None, constraint.path))
            branch.facts[(integer_constraint, holds)] = None
        return bool(branch.types)

    def _one_of(self, nodes: tuple[Node, ...], branch: _Branch) -> Iterator[list[Literal]]:
        """For each alternative: it, and the negation of every other one that could hold with it, given the branch so far."""
        known_literals = (*branch.facts, (self._types_of(branch), True))
        possible = [node for node in nodes if not self._is_empty((*known_literals, (node, True)))]
        for node in possible:
            others = [
                other
                for other in possible
                if other is not node and not self._is_empty((*known_literals, *conjunction((node, other))))
            ]
            yield [(node, True), *((other, False) for other in others)]

    def _types_of(self, branch: _Branch) -> Constraint:
        return self._type_facts.setdefault(branch.types, Constraint("type", branch.types, "#"))

    def _negated(self, constraint: Constraint) -> list[list[Literal]] | None:
        """Alternatives that together are the opposite of a constraint; None where a negative fact is handled as it is."""
        value = constraint.value
        if constraint.kind == "members":
            return self._negated_members(constraint, value)
        if constraint.kind == "enum":
            return self._negated_enum(constraint, value)
        if constraint.kind == "names":
            names = self._names_of(((value, False),))
            return [[_pair(names, (), constraint)]]
        if constraint.kind == "items":
            return _negated_items(constraint, value)
        if constraint.kind == "contains":
            return _negated_contains(constraint, value)
        return None

    def _negated_enum(self, constraint: Constraint, values: list[Any]) -> list[list[Literal]] | None:
        """The value is none of these. Arrays and objects among them are excluded as schemas that only they satisfy."""
        nested = [value for value in values if isinstance(value, list | dict) and value]
        if not nested:
            return None
        others = [value for value in values if not (isinstance(value, list | dict) and value)]
        nodes = [self._keywords.document.const_node(value, constraint.path) for value in nested]
        return [[(Constraint("enum", others, constraint.path), False), *((node, False) for node in nodes)]]

    def _negated_members(self, constraint: Constraint, members: Members) -> list[list[Literal]]:
        """The object has a property that breaks the rule for its name."""
        alternatives: list[list[Literal]] = [
            [(Constraint("member", (name, (node, False)), constraint.path), True)] for name, node in members.named.items()
        ]
        try:
            for pattern, node in members.patterned:
                alternatives.append([_pair(search_language(pattern), ((node, False),), constraint)])
            if members.others is not None:
                listed = alt(*(literal(name) for name in members.named))
                patterns = (complement(search_language(pattern, wide=True)) for pattern, _ in members.patterned)
                alternatives.append(
                    [_pair(intersection(complement(listed), *patterns), ((members.others, False),), constraint)]
                )
        except PatternError as error:
            raise refusal(constraint.path, f"a pattern with {error}") from error
        return alternatives


def _choice_order(choice: list[list[Literal]] | OneOf) -> int:
    """Sort key: choices with few alternatives are made first, and those that further facts narrow last."""
    return CASES_MAX + len(choice.nodes) if isinstance(choice, OneOf) else len(choice)


def _pair(names: Regex, value: Term, origin: Constraint) -> Literal:
    return (Constraint("pair", Pair(names, value), origin.path), True)


def _dependent(constraint: Constraint, holds: bool) -> list[list[Literal]]:
    name, node = constraint.value
    present = Constraint("required", name, constraint.path)
    if not holds:
        return [[(present, True), (Constraint("type", frozenset({"object"}), constraint.path), True), (node, False)]]
    return [
        [(Constraint("type", frozenset({"object"}), constraint.path), False)],
        [(present, False)],
        [(present, True), (node, True)],
    ]


def _none_or_two(nodes: list[Node]) -> list[list[Literal]]:
    pairs = [[(a, True), (b, True)] for i, a in enumerate(nodes) for b in nodes[i + 1 :]]
    return [[(node, False) for node in nodes], *pairs]  # type: ignore[list-item]


def _negated_items(constraint: Constraint, items: Items) -> list[list[Literal]]:
    """The array has an item that breaks the rule for its position: a fixed position, or any after the first ones."""
    alternatives: list[list[Literal]] = []
    for position, node in enumerate(items.first):
        alternatives.append([(Constraint("at", (position, node), constraint.path), True)])
    if items.others is not None:
        if items.first:
            raise refusal(constraint.path, "the negation of an array with items of several kinds")
        alternatives.append([(Constraint("contains", Contains(items.others, 1, None, holds=False), constraint.path), True)])
    return alternatives


def _negated_contains(constraint: Constraint, contains: Contains) -> list[list[Literal]]:
    alternatives: list[list[Literal]] = []
    if contains.low > 0:
        alternatives.append(
            [(Constraint("contains", Contains(contains.node, 0, contains.low - 1, contains.holds), constraint.path), True)]
        )
    if contains.high is not None:
        alternatives.append(
            [(Constraint("contains", Contains(contains.node, contains.high + 1, None, contains.holds), constraint.path), True)]
        )
    return alternatives
