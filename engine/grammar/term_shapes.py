"""From a term to the shapes of its values: its constraints are brought together, type by type. Knows no grammar syntax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from engine.grammar.formats import format_language
from engine.grammar.numbers import Bound, Numbers
from engine.grammar.patterns import PatternError, search_language
from engine.grammar.regex import (
    ANY_CHAR,
    ANYTHING,
    NOTHING,
    Regex,
    alt,
    complement,
    intersection,
    is_plain,
    literal,
    matches,
    repeat,
)
from engine.grammar.schema_cases import Case, Cases, conjunction, make_term
from engine.grammar.schema_keywords import Keywords
from engine.grammar.schema_nodes import Constraint, Items, Members, Node, refusal
from engine.grammar.schema_values import Literal, Pair, Term, Values, equality_key, nodes_of, type_of
from engine.grammar.shapes import Array, Constants, Counted, Member, Object, OtherMembers, Shape, Strings

NAME_CLASSES_MAX = 64
UNIQUE_VALUES_MAX = 60
Facts = list[tuple[Constraint, bool]]


@dataclass(frozen=True, slots=True)
class MemberRules:
    """The rules for an object's properties, from its facts. `of_names` is the term of every name, `of_members` the schema that
    the value of a name must satisfy or violate, with that name; `mentioned` holds every name in these rules but those of
    patterns.
    """

    groups: list[Members]
    pairs: tuple[Pair, ...]
    of_names: Term
    of_members: list[tuple[str, Literal]]
    required: frozenset[str]
    absent: frozenset[str]
    mentioned: tuple[str, ...]

    @classmethod
    def of(cls, facts: Facts) -> MemberRules:
        groups: list[Members] = _values_of(facts, "members")
        of_members: list[tuple[str, Literal]] = _values_of(facts, "member")
        names_of_members = [name for name, _ in of_members]
        return cls(
            groups=groups,
            pairs=tuple(_values_of(facts, "pair")),
            of_names=conjunction(_values_of(facts, "names")),  # a negated one was turned into a pair before
            of_members=of_members,
            required=frozenset((*_values_of(facts, "required", holds=True), *names_of_members)),
            absent=frozenset(_values_of(facts, "required", holds=False)),
            mentioned=(*(name for group in groups for name in group.named), *_values_of(facts, "required"), *names_of_members),
        )


class Shapes:
    """Shapes of the terms of one document. `matches_nothing(language)` decides whether a language is empty."""

    def __init__(self, keywords: Keywords, matches_nothing: Callable[[Regex], bool]) -> None:
        self._cases = Cases(keywords, self.is_empty, self.strings)
        self._values = Values(keywords)
        self._matches_nothing = matches_nothing
        self._cache: dict[Term, tuple[Shape, ...]] = {}
        self._emptiness: dict[Term, bool] = {}

    def of(self, term: Term) -> tuple[Shape, ...]:
        """Shapes that together are exactly the values of the term. Raises `GrammarError`."""
        if term not in self._cache:
            shapes: dict[Any, Shape] = {}
            for case in self._cases.of(term):
                for shape in self._of_case(case):
                    shapes.setdefault(equality_key(list(shape.values)) if isinstance(shape, Constants) else shape, shape)
            self._cache[term] = tuple(shapes.values())
        return self._cache[term]

    def is_empty(self, term: Term) -> bool:
        """Whether no value satisfies the term. A term that refers to itself is assumed to have a value meanwhile."""
        if term not in self._emptiness:
            self._emptiness[term] = False
            self._emptiness[term] = not self.of(term)
        return self._emptiness[term]

    def strings(self, term: Term) -> Regex:
        """The strings that satisfy a term."""
        languages: list[Regex] = []
        for shape in self.of(term):
            if isinstance(shape, Strings):
                languages.append(shape.language)
            elif isinstance(shape, Constants):
                languages.extend(literal(value) for value in shape.values if isinstance(value, str))
        return alt(*languages)

    def enumerated(self, term: Term) -> list[Any] | None:
        """Every value of a term; None when they cannot be listed."""
        value_by_key: dict[Any, Any] = {}
        for shape in self.of(term):
            values: Sequence[Any] | None = None
            if isinstance(shape, Constants):
                values = shape.values
            elif isinstance(shape, Numbers):
                values = shape.enumerated()
            if values is None:
                return None
            value_by_key.update((equality_key(value), value) for value in values)
        return list(value_by_key.values())

    def _of_case(self, case: Case) -> list[Shape]:
        if case.values is not None:
            return [Constants(case.values)]
        excluded = [v for c, holds in case.facts if c.kind == "enum" and not holds for v in c.value]
        excluded_keys = {equality_key(v) for v in excluded}
        plain = [v for v in (None, False, True) if type_of(v) in case.types and equality_key(v) not in excluded_keys]
        shapes: list[Shape | None] = [Constants(tuple(plain))] if plain else []
        makers: dict[str, Callable[[Facts, list[Any]], Shape | None]] = {
            "number": self._numbers,
            "string": self._strings,
            "array": self._array,
            "object": self._object,
        }
        for name, make in makers.items():
            if name in case.types:
                shapes.append(make(case.of_type(name), [v for v in excluded if type_of(v) == name]))
        return [shape for shape in shapes if shape is not None]

    def _numbers(self, facts: Facts, excluded: list[Any]) -> Shape | None:
        lows, highs, multiples, others = set[Bound](), set[Bound](), set[Fraction](), set[Fraction]()
        is_whole = False
        for constraint, holds in facts:
            value = constraint.value
            if constraint.kind == "whole":
                (multiples if holds else others).add(Fraction(1))
                is_whole = is_whole or holds
            elif constraint.kind == "multiple":
                (multiples if holds else others).add(value)
            elif constraint.kind in ("low", "high"):
                limit, is_exclusive = value
                side = lows if (constraint.kind == "low") is holds else highs
                side.add(Bound(limit, is_exclusive if holds else not is_exclusive))
        points = tuple(sorted({Fraction(value) for value in excluded}))
        limits = (_tightest(lows, 1), _tightest(highs, -1))
        numbers = Numbers(*limits, tuple(sorted(multiples)), tuple(sorted(others)), points, is_whole)
        values = numbers.enumerated()
        if values is None:
            return numbers
        return Constants(tuple(int(value) if is_whole else value for value in values)) if values else None

    def _strings(self, facts: Facts, excluded: list[Any]) -> Shape | None:
        low, high = _limits(facts, "min_length", "max_length")
        parts = [_string_language(constraint, holds) for constraint, holds in facts if constraint.kind in ("pattern", "format")]
        if high is not None and high < low:
            return None
        parts.append(repeat(ANY_CHAR, low, high))
        if excluded:
            parts.append(complement(alt(*(literal(value) for value in excluded))))
        language = intersection(*parts)
        return None if self.matches_nothing(language) else Strings(language)

    def matches_nothing(self, language: Regex) -> bool:
        return language == NOTHING or (not is_plain(language) and self._matches_nothing(language))

    def _array(self, facts: Facts, excluded: list[Any]) -> Shape | None:
        first, others = self._items(facts)
        low, high = _limits(facts, "min_items", "max_items")
        low = max(low, *(position + 1 for position, _ in _values_of(facts, "at")), 0)
        if excluded:  # the empty array; others were taken apart before
            low = max(low, 1)
        for position, item in enumerate((*first, others)):
            if (high is None or position < high) and self.is_empty(item):  # so the array ends before this position
                high = position
                break
        if high is not None and high < low:
            return None
        first = first[:high]
        counted = tuple(
            Counted(((contains.node, contains.holds),), ((contains.node, not contains.holds),), contains.low, contains.high)
            for contains in _values_of(facts, "contains")
        )
        if high is not None and any(rule.low > high for rule in counted):
            return None
        if any(rule.low and self.is_empty(make_term((*rule.value, *others))) and not first for rule in counted):
            return None
        may_repeat = high is None or high > 1
        if not may_repeat and _values_of(facts, "unique", holds=False):
            return None
        unique = self._unique(facts, None if first or counted else others) if may_repeat else None
        return Array(first, others, low, high, counted, unique)

    def _items(self, facts: Facts) -> tuple[tuple[Term, ...], Term]:
        """The items of an array by position, as far as the schema distinguishes positions, and all later ones."""
        groups: list[Items] = _values_of(facts, "items")
        violations: list[tuple[int, Node]] = _values_of(facts, "at")
        length = max([0, *(len(items.first) for items in groups), *(position + 1 for position, _ in violations)])

        def item(position: int) -> Term:
            nodes = [(group.first[position] if position < len(group.first) else group.others) for group in groups]
            holding = [(node, True) for node in nodes if node is not None]
            return make_term([*holding, *((node, False) for index, node in violations if index == position)])

        return tuple(item(position) for position in range(length)), item(length)

    def _unique(self, facts: Facts, item: Term | None) -> tuple[Any, ...] | None:
        """The values that may each occur once, of which every item must be one; None where items may be equal. `item`: the
        term of every item, None where items differ."""
        rules = [(constraint, holds) for constraint, holds in facts if constraint.kind == "unique"]
        if not rules:
            return None
        constraint, holds = min(rules, key=lambda rule: rule[1])
        values = None if item is None or not holds else self.enumerated(item)
        if values is None or len(values) > UNIQUE_VALUES_MAX:
            keyword = "uniqueItems" if holds else "the negation of uniqueItems"
            raise refusal(constraint.path, f"{keyword} over items that are not a list of at most {UNIQUE_VALUES_MAX} values")
        return tuple(values)

    def _object(self, facts: Facts, excluded: list[Any]) -> Shape | None:
        rules = MemberRules.of(facts)
        low, high = _limits(facts, "min_members", "max_members")
        if excluded:  # the empty object; others were taken apart before
            low = max(low, 1)
        num_required = len(rules.required)
        allowed = self._enumerated_names(rules.of_names)
        names = list(dict.fromkeys((*rules.mentioned, *(allowed or ()))))
        try:
            named = self._named(rules, names)
            if named is None:
                return None
            others = () if allowed is not None or high == num_required else self._others(rules, names, facts)
        except PatternError as error:
            raise refusal(_path_of(facts), f"a pattern with {error}") from error
        shape = Object(named, others, low, high, rules.pairs, any_order=_has_no_common_order(named, rules.groups))
        return self._checked_object(shape, num_required, facts)

    def _named(self, rules: MemberRules, names: list[str]) -> tuple[Member, ...] | None:
        """Those of the names that a property may have; None if a required one may not."""
        named: list[Member] = []
        for name in names:
            value = make_term([*_schemas_of_member(rules.groups, name), *(rule for n, rule in rules.of_members if n == name)])
            is_possible = name not in rules.absent and all(self._values.holds(rule, name) for rule in rules.of_names)
            if is_possible and not self.is_empty(value):
                pairs = tuple(index for index, pair in enumerate(rules.pairs) if matches(pair.names, name))
                named.append(Member(name, value, name in rules.required, pairs))
            elif name in rules.required:
                return None
        return tuple(named)

    def _checked_object(self, shape: Object, num_required: int, facts: Facts) -> Object | None:
        if shape.high is not None and shape.high < max(shape.low, num_required):
            return None
        if not shape.others and len(shape.named) < shape.low:
            return None
        may_repeat = shape.high is None or shape.high - num_required > 1
        for index, pair in enumerate(shape.pairs):
            members: tuple[Member | OtherMembers, ...] = (*shape.named, *shape.others)
            serving = [member for member in members if index in member.pairs and self._serves(member, pair)]
            if not serving:
                return None
            if may_repeat and any(isinstance(member, OtherMembers) and self._may_break(member, pair) for member in serving):
                raise refusal(_path_of(facts, "pair"), "the negation of a rule for open names: a name may repeat")
        if shape.others and shape.low > max(1, num_required):
            raise refusal(_path_of(facts, "min_members"), "minProperties above 1 where names are open: a name may repeat")
        return shape

    def _serves(self, member: Member | OtherMembers, pair: Pair) -> bool:
        return not self.is_empty(make_term((*member.value, *pair.value)))

    def _may_break(self, member: OtherMembers, pair: Pair) -> bool:
        """Whether the same name, written again, can have a value that the pair does not allow. Readers keep the last one."""
        return any(not self.is_empty(make_term((*member.value, (formula, not holds)))) for formula, holds in pair.value)

    def _enumerated_names(self, rules: Term) -> list[str] | None:
        """All names there can be, when `propertyNames` lists them."""
        if not rules or any(isinstance(shape, Strings) for shape in self.of(rules)):
            return None
        values = (value for shape in self.of(rules) if isinstance(shape, Constants) for value in shape.values)
        return [value for value in values if isinstance(value, str)]

    def _others(self, rules: MemberRules, names: list[str], facts: Facts) -> tuple[OtherMembers, ...]:
        """Other names, grouped by the patterns and pairs that they match, which determine the schemas of their values."""
        start = self.strings(rules.of_names) if rules.of_names else ANYTHING
        patterns = list(dict.fromkeys(pattern for group in rules.groups for pattern, _ in group.patterned))
        classes: list[tuple[Regex, frozenset[str | int]]] = [(start, frozenset())]
        tests: list[tuple[str | int, Regex, Regex]] = [
            (pattern, search_language(pattern), complement(search_language(pattern, wide=True))) for pattern in patterns
        ]
        tests += [(index, pair.names, complement(pair.names)) for index, pair in enumerate(rules.pairs)]
        for test, inside, outside in tests:
            split = [(intersection(language, inside), matched | {test}) for language, matched in classes]
            split += [(intersection(language, outside), matched) for language, matched in classes]
            classes = [(language, matched) for language, matched in split if not self.matches_nothing(language)]
            if len(classes) > NAME_CLASSES_MAX:
                raise refusal(_path_of(facts, "members"), f"patterns that overlap in more than {NAME_CLASSES_MAX} ways")
        other_members = []
        for language, matched in classes:
            value = conjunction(node for group in rules.groups for node in _nodes_matched(group, matched))
            named_languages = [literal(name) for name in names if matches(language, name)]
            remaining = intersection(language, complement(alt(*named_languages))) if named_languages else language
            if not self.is_empty(value) and not (named_languages and language != ANYTHING and self.matches_nothing(remaining)):
                other_members.append(OtherMembers(remaining, value, tuple(sorted(i for i in matched if isinstance(i, int)))))
        return tuple(other_members)


def _values_of(facts: Facts, kind: str, *, holds: bool | None = None) -> list[Any]:
    """The values of a kind's constraints: of all, of those that must hold, or of those that must not."""
    return [constraint.value for constraint, is_wanted in facts if constraint.kind == kind and holds in (None, is_wanted)]


def _has_no_common_order(named: Sequence[Member], groups: Sequence[Members]) -> bool:
    """Whether no single `properties` of the schema lists all these names, which would define their order."""
    name_sets = [set(group.named) for group in groups if group.named and group.is_ordered]
    return all(any(member.name not in names for member in named) for names in name_sets or [set[str]()])


def _schemas_of_member(groups: Sequence[Members], name: str) -> list[Literal]:
    return [(node, True) for group in groups for node in nodes_of(group, name)]


def _nodes_matched(group: Members, matched: frozenset[str | int]) -> list[Node]:
    nodes = [node for pattern, node in group.patterned if pattern in matched]
    if not nodes and group.others is not None:
        return [group.others]
    return nodes


def _tightest(bounds: set[Bound], side: int) -> tuple[Bound, ...]:
    """The bound that implies the others: the greatest low (side 1) or the least high (side -1)."""
    return (max(bounds, key=lambda b: (side * b.value, b.is_exclusive)),) if bounds else ()


def _limits(facts: Facts, at_least: str, at_most: str) -> tuple[int, int | None]:
    low, high = 0, None
    for constraint, holds in facts:
        value = constraint.value
        if constraint.kind == (at_least if holds else at_most):
            low = max(low, value if holds else value + 1)
        elif constraint.kind == (at_most if holds else at_least):
            limit = value if holds else value - 1
            high = limit if high is None else min(high, limit)
    return low, high


def _string_language(constraint: Constraint, holds: bool) -> Regex:
    if constraint.kind == "pattern":
        try:
            language = search_language(constraint.value, wide=not holds)
        except PatternError as error:
            raise refusal(constraint.path, f"a pattern with {error}") from error
        return language if holds else complement(language)
    texts = format_language(constraint.value)
    if texts is None:
        return ANYTHING if holds else NOTHING
    return texts if holds else complement(texts)


def _path_of(facts: Facts, kind: str | None = None) -> str:
    return next((c.path for c, _ in facts if kind in (None, c.kind)), "#")
