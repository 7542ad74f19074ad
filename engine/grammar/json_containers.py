"""The contents of objects and arrays whose elements depend on one another, as rules: each state of such a list is one rule."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

from engine.grammar.lark_rules import BITS, Body, Rules, comma
from engine.grammar.regex import literal
from engine.grammar.schema_cases import make_term
from engine.grammar.schema_nodes import PARAM
from engine.grammar.schema_values import Term
from engine.grammar.shapes import Array, Member, Object, OtherMembers
from engine.grammar.spec import GrammarError

STATES_MAX = 5_000
FREE_NAMES_MAX = 8
"""Most named properties for which any order is allowed, with a state for each set of them used so far."""

_State = tuple[int, int, frozenset[int]]


class ObjectWriter:
    """The contents of one object. A state is how many of the named properties are past, how many properties there were (as far
    as it matters: up to 1, or up to the limits), and which of the required pairs have been satisfied.

        open(i)     other properties may come here
          └─► due(i)  the next property is one of the named ones from i on, or the end
        free(used)  any order: `used` has a bit for every named property already written
    """

    def __init__(self, rules: Rules, value: Callable[[Term], str], shape: Object) -> None:
        self._rules = rules
        self._value = value
        self._shape = shape
        self._count_max = max(1, shape.low, 0 if shape.high is None else shape.high)
        self._needs_no_count = shape.high is None and shape.low <= 1 and not shape.pairs
        self._num_states = 0
        self._pending: deque[tuple[str, str, _State]] = deque()
        self._named = tuple(rules.intern(member) for member in shape.named)
        self._constraints_id = rules.intern((shape.others, shape.low, shape.high, shape.pairs))

    def start(self) -> str:
        if self._shape.any_order and self._needs_no_count and len(self._shape.named) <= BITS:
            return self._each_once()
        any_order = self._shape.any_order and len(self._shape.named) <= FREE_NAMES_MAX
        name = self._state("free" if any_order else "open", (0, 0, frozenset()))
        bodies = {"open": self._open, "due": self._due, "free": self._free}
        while self._pending:
            rule, kind, state = self._pending.popleft()
            self._rules.rules[rule] = bodies[kind](state)
        return name

    def _each_once(self) -> str:
        named = sorted(self._shape.named, key=lambda member: not member.required)
        items = [self._member(member, frozenset()) for member in named]
        others = tuple(self._member(other, frozenset()) for other in self._shape.others)
        needed = sum(member.required for member in named)
        name = self._rules.each_once(items, others, f"is_ones([0:{needed}])" if needed else "", needed=needed)
        if not needed and self._shape.low:
            self._rules.rules[name] = [body for body in self._rules.rules[name] if body]
        return name

    def _state(self, kind: str, state: _State) -> str:
        index, count, satisfied = state
        # What can follow depends only on the remaining properties, so objects that end the same way share their rules.
        key = (
            kind,
            self._named if kind == "free" else self._named[index:],
            self._constraints_id,
            index * (kind == "free"),
            count,
            satisfied,
        )
        if key not in self._rules.memo:
            self._num_states += 1
            if self._num_states > STATES_MAX:
                raise GrammarError(PARAM, f"the schema has an object whose limits need more than {STATES_MAX} states")
            self._rules.memo[key] = self._rules.rule([])
            self._pending.append((self._rules.memo[key], kind, state))
        return self._rules.memo[key]

    def _open(self, state: _State) -> list[Body]:
        index, count, satisfied = state
        due = self._state("due", state)
        if self._needs_no_count and count:
            return [(self._other_members(), due)] if self._shape.others else [(due,)]
        bodies: list[Body] = [(due,)]
        if self._may_add(count):
            for other in self._shape.others:
                for newly_satisfied, pair in self._variants(other):
                    following = self._state("open", (index, self._next_count(count), satisfied | newly_satisfied))
                    bodies.append((*comma(count), pair, following))
        return bodies

    def _due(self, state: _State) -> list[Body]:
        index, count, satisfied = state
        if index == len(self._shape.named):
            return [()] if self._is_end(count, satisfied) else []
        member = self._shape.named[index]
        bodies: list[Body] = [] if member.required else [(self._state("due", (index + 1, count, satisfied)),)]
        if self._may_add(count):
            for newly_satisfied, pair in self._variants(member):
                following = self._state("open", (index + 1, self._next_count(count), satisfied | newly_satisfied))
                bodies.append((*comma(count), pair, following))
        return bodies

    def _free(self, state: _State) -> list[Body]:
        used, count, satisfied = state
        complete = all(used >> i & 1 for i, member in enumerate(self._shape.named) if member.required)
        bodies: list[Body] = [()] if complete and self._is_end(count, satisfied) else []
        if self._may_add(count):
            choices: list[tuple[Member | OtherMembers, int]] = [(other, used) for other in self._shape.others]
            choices += [(member, used | 1 << i) for i, member in enumerate(self._shape.named) if not used >> i & 1]
            for member, used_after in choices:
                for newly_satisfied, pair in self._variants(member):
                    following = self._state("free", (used_after, self._next_count(count), satisfied | newly_satisfied))
                    bodies.append((*comma(count), pair, following))
        return bodies

    def _is_end(self, count: int, satisfied: frozenset[int]) -> bool:
        return count >= self._shape.low and len(satisfied) == len(self._shape.pairs)

    def _may_add(self, count: int) -> bool:
        return self._shape.high is None or count < self._shape.high

    def _next_count(self, count: int) -> int:
        return min(count + 1, self._count_max)

    def _variants(self, member: Member | OtherMembers) -> list[tuple[frozenset[int], str]]:
        """A property as it is, and in a form for each set of required pairs that it can satisfy."""
        variants = []
        for size in range(len(member.pairs) + 1):
            for chosen in itertools.combinations(member.pairs, size):
                variants.append((frozenset(chosen), self._member(member, frozenset(chosen))))
        return variants

    def _member(self, member: Member | OtherMembers, satisfied: frozenset[int]) -> str:
        key = ("member", self._rules.intern(member), satisfied and (satisfied, self._constraints_id))
        if key not in self._rules.memo:
            literals = list(member.value)
            for index in sorted(satisfied):
                literals += self._shape.pairs[index].value
            value = make_term(literals)
            names = literal(member.name) if isinstance(member, Member) else member.names
            body = (self._rules.string(names), "COLON", self._value(value))
            self._rules.memo[key] = self._rules.rule([body])
        return self._rules.memo[key]

    def _other_members(self) -> str:
        """Any number of other properties, each after a comma; left-recursive, which suits the parser."""
        key = ("others", self._constraints_id)
        if key not in self._rules.memo:
            name = self._rules.rule([])
            self._rules.memo[key] = name
            others = [self._member(other, frozenset()) for other in self._shape.others]
            self._rules.rules[name] = [(), *((name, "COMMA", other) for other in others)]
        return self._rules.memo[key]


class ArrayWriter:
    """The contents of an array in which some items are counted. A state is the number of items so far, and of each counted
    kind, as far as they matter."""

    def __init__(self, rules: Rules, value: Callable[[Term], str], shape: Array) -> None:
        self._rules = rules
        self._value = value
        self._shape = shape
        self._length_max = max(1, shape.low, len(shape.first), 0 if shape.high is None else shape.high)
        self._rule_names: dict[tuple[int, ...], str] = {}
        self._pending: deque[tuple[int, ...]] = deque()

    def start(self) -> str:
        name = self._state((0,) * (1 + len(self._shape.counted)))
        while self._pending:
            state = self._pending.popleft()
            self._rules.rules[self._rule_names[state]] = self._bodies(state)
        return name

    def _state(self, state: tuple[int, ...]) -> str:
        if state not in self._rule_names:
            if len(self._rule_names) == STATES_MAX:
                raise GrammarError(PARAM, f"the schema has an array whose limits need more than {STATES_MAX} states")
            self._rule_names[state] = self._rules.rule([])
            self._pending.append(state)
        return self._rule_names[state]

    def _bodies(self, state: tuple[int, ...]) -> list[Body]:
        shape, (length, *counts) = self._shape, state
        has_minimums = all(count >= counted.low for count, counted in zip(counts, shape.counted, strict=True))
        bodies: list[Body] = [()] if length >= shape.low and has_minimums else []
        if shape.high is not None and length >= shape.high:
            return bodies
        item = shape.first[length] if length < len(shape.first) else shape.others
        for hits in itertools.product((False, True), repeat=len(counts)):
            literals, following = list(item), [min(length + 1, self._length_max)]
            for hit, count, counted in zip(hits, counts, shape.counted, strict=True):
                if hit:
                    literals += counted.value
                elif counted.high is not None:
                    literals += counted.opposite
                cap = counted.low if counted.high is None else counted.high + 1
                following.append(min(count + hit, cap))
            if all(counted.high is None or n <= counted.high for n, counted in zip(following[1:], shape.counted, strict=True)):
                value = self._value(make_term(literals))
                bodies.append((*comma(length), value, self._state(tuple(following))))
        return bodies
