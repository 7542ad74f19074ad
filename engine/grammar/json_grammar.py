"""Writes the shapes of a schema as a Lark grammar of JSON texts. Knows the library's syntax and nothing of schemas' keywords.

White space is what JSON writers put: any run of up to `SPACE_MAX` blanks around punctuation. Every terminal is one token of
JSON together with its punctuation's blanks, so that the library's greedy lexer never has to choose. Rules are kept as data
until the end, when those that can produce no text are taken out: a text can always be completed.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from engine.grammar.numbers import Automaton, NumberError, Numbers, automaton
from engine.grammar.regex import Regex, literal
from engine.grammar.schema_cases import term
from engine.grammar.schema_document import PARAM
from engine.grammar.schema_values import Term, type_of
from engine.grammar.shapes import Array, Listed, Member, Object, OtherMembers, Shape, Shapes, Texts
from engine.grammar.spec import GrammarError
from engine.grammar.terminals import Terminals

SPACE_MAX = 128
RULES_MAX = 60_000
OBJECT_STATES_MAX = 5_000
REPEATED_MAX = 100_000

_SPACE = rf"[ \n\r\t]{{0,{SPACE_MAX}}}"
_PUNCTUATION = {
    "LBRACE": rf"/\{{{_SPACE}/",
    "RBRACE": rf"/{_SPACE}\}}/",
    "LBRACKET": rf"/\[{_SPACE}/",
    "RBRACKET": rf"/{_SPACE}\]/",
    "COMMA": rf"/{_SPACE},{_SPACE}/",
    "COLON": rf"/{_SPACE}:{_SPACE}/",
    "INTEGER": r"/-?(0|[1-9][0-9]*)/",
    # Exponents stop short of what a 64-bit float cannot hold.
    "NUMBER": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?0*([0-9]|[1-9][0-9]|[12][0-9][0-9]))?/",
}


@dataclass(frozen=True, slots=True)
class Repeated:
    """`low` to `high` times the symbols in a row."""

    symbols: tuple[str, ...]
    low: int
    high: int | None


Symbol = str | Repeated
"""The name of a rule (lower case, with `::` and its parameter where it has one) or of a terminal (upper case), a repetition,
or a condition on the parameter (`%if …`)."""
Body = tuple[Symbol, ...]
BITS = 60
"""Items that a rule's parameter keeps account of; the library has 64 bits and needs a few numbers to compare with."""


class JsonGrammar:
    """The grammar of one term. Written once."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._terminals = Terminals()
        self.rules: dict[str, list[Body]] = {}
        self._terms: dict[Term, str] = {}
        self._waiting: deque[tuple[str, Term]] = deque()
        self._parametric: set[str] = set()
        self._also_needed: dict[str, set[str]] = {}
        self._count = itertools.count()
        self.shared: dict[tuple[Any, ...], str] = {}
        self._numbered: dict[Any, int] = {}

    def write(self, wanted: Term) -> str:
        """Raises `GrammarError` for a term that nothing satisfies, and beyond `RULES_MAX`."""
        start = self.value(wanted)
        while self._waiting:
            name, each = self._waiting.popleft()
            self.rules[name] = [self._shape(shape) for shape in self._shapes.of(each)]
        self._drop_unproductive()
        if not self.rules.get(start):
            raise GrammarError(PARAM, "guided_json cannot be satisfied by any text")
        return self._text(start)

    def rule(self, bodies: list[Body]) -> str:
        name = f"r{next(self._count)}"
        self.rules[name] = bodies
        if len(self.rules) > RULES_MAX:
            raise GrammarError(PARAM, f"guided_json needs more than {RULES_MAX} rules")
        return name

    def number_of(self, part: Any) -> int:
        """A small name for a part of a shape, the same for equal ones: parts are trees, slow to compare again and again."""
        return self._numbered.setdefault(part, len(self._numbered))

    def value(self, wanted: Term) -> str:
        """The rule of a term, written later."""
        if wanted not in self._terms:
            name = self.rule([])
            self._terms[wanted] = name
            self._waiting.append((name, wanted))
        return self._terms[wanted]

    def _shape(self, shape: Shape) -> Body:
        if isinstance(shape, Listed):
            return (self.rule([self._constant(value) for value in shape.values]),)
        if isinstance(shape, Texts):
            return (self.string(shape.language),)
        if isinstance(shape, Numbers):
            return (self._number(shape),)
        if isinstance(shape, Object):
            members = _ObjectWriter(self, shape)
            return ("LBRACE", members.start_any_order() if members.can_be_any_order else members.start(), "RBRACE")
        return ("LBRACKET", self._array(shape), "RBRACKET")

    def string(self, language: Regex) -> str:
        return self._terminals.name(self._terminals.json_string(language), "S")

    def _constant(self, value: Any) -> Body:
        """One value, its properties in the order in which the schema has them."""
        kind = type_of(value)
        if kind == "string":
            return (self.string(literal(value)),)
        if kind == "number":
            return (self._terminals.name(f"/{_number_pattern(Fraction(value))}/", "N"),)
        if kind == "array":
            items = [self._constant(item) for item in value]
            return ("LBRACKET", *(s for i, item in enumerate(items) for s in ((("COMMA",) if i else ()) + item)), "RBRACKET")
        if kind == "object":
            body: list[Symbol] = []
            for name, item in value.items():
                body += [*(("COMMA",) if body else ()), self.string(literal(name)), "COLON", *self._constant(item)]
            return ("LBRACE", *body, "RBRACE")
        return (self._terminals.name(f'"{json.dumps(value)}"', "K"),)

    def _number(self, numbers: Numbers) -> str:
        if numbers.is_free:
            return "NUMBER"
        if numbers == Numbers(multiples=(Fraction(1),)):
            return "INTEGER"
        try:
            found = automaton(numbers)
        except NumberError as error:
            raise GrammarError(PARAM, f"guided_json cannot be enforced: {error}") from error
        return self._automaton(found)

    def _automaton(self, found: Automaton) -> str:
        """A rule for each state: a digit, then the rule of the next state."""
        names = [self.rule([]) for _ in found.edges]
        for state, edges in enumerate(found.edges):
            by_next: dict[int, str] = {}
            for character, following in edges.items():
                by_next[following] = by_next.get(following, "") + character
            bodies: list[Body] = [(self._terminals.name(f"/[{_escaped(c)}]/", "D"), names[n]) for n, c in by_next.items()]
            self.rules[names[state]] = [*bodies, *([()] if state in found.accepting else [])]
        return names[0] if names else self.rule([])

    def _array(self, shape: Array) -> str:
        if shape.unique is not None:
            return self._unique(shape)
        if shape.counted:
            return _ArrayWriter(self, shape).start()
        following = self._tail(shape)
        for place in range(len(shape.first) - 1, -1, -1):
            bodies: list[Body] = [()] if shape.low <= place else []
            bodies.append((*(("COMMA",) if place else ()), self.value(shape.first[place]), following))
            following = self.rule(bodies)
        return following

    def _tail(self, shape: Array) -> str:
        """What follows the items by position, any number of equal ones."""
        place = len(shape.first)
        low = max(0, shape.low - place)
        high = None if shape.high is None else shape.high - place
        if max(low, high or 0) > REPEATED_MAX:
            raise GrammarError(PARAM, f"guided_json has minItems or maxItems above {REPEATED_MAX}")
        if high == 0:
            return self.rule([()])
        item = self.value(shape.others)
        if place:
            return self.rule([(Repeated(("COMMA", item), low, high),)])
        more = Repeated(("COMMA", item), max(0, low - 1), None if high is None else high - 1)
        return self.rule([*([()] if low == 0 else []), (item, more)])

    def _unique(self, shape: Array) -> str:
        """Each value at most once."""
        assert shape.unique is not None
        high = len(shape.unique) if shape.high is None else min(shape.high, len(shape.unique))
        if high < shape.low:
            return self.rule([])
        items = [self.rule([self._constant(value)]) for value in shape.unique]
        return self.each_once(items, (), f"bit_count_ge(_, {shape.low})" if shape.low else "", high)

    def each_once(self, items: list[str], others: tuple[str, ...], done: str, high: int = BITS, needed: int = 0) -> str:
        """A list of `items`, each at most once and in any order, and of `others`; at most `high` items, and the end where
        `done` holds. The rule's parameter has a bit for every item used; the first `needed` items must not be missing."""
        rest, start = self.rule([]), self.rule([])
        self._parametric.add(rest)
        end: Body = (f"%if {done}",) if done else ()
        once = [(item, f"{rest}::set_bit({bit})") for bit, item in enumerate(items)]
        room = f"bit_count_lt(_, {high})" if high < len(items) else ""
        guards = [f"%if and(bit_clear({bit}), {room})" if room else f"%if bit_clear({bit})" for bit in range(len(items))]
        bodies = [("COMMA", *body, guard) for body, guard in zip(once, guards, strict=True)]
        self.rules[rest] = [end, *bodies, *(("COMMA", other, f"{rest}::_") for other in others)]
        first = [(item, f"{rest}::{hex(1 << bit)}") for bit, item in enumerate(items) if high > 0]
        self.rules[start] = [*first, *((other, f"{rest}::0x0") for other in others), *([] if done else [()])]
        self._also_needed[start] = set(items[:needed])
        return start

    def _drop_unproductive(self) -> None:
        """Take out bodies that name a rule without any finite text, until none is left."""
        users: dict[str, set[str]] = {}
        for name, bodies in self.rules.items():
            for needed in (n for body in bodies for n in _needed(body)):
                users.setdefault(needed, set()).add(name)
            for needed in self._also_needed.get(name, ()):
                users.setdefault(needed, set()).add(name)
        alive = set[str]()
        waiting = deque(self.rules)
        while waiting:
            name = waiting.popleft()
            complete = self._also_needed.get(name, set()) <= alive
            if name not in alive and complete and any(_needed(body) <= alive for body in self.rules[name]):
                alive.add(name)
                waiting.extend(users.get(name, ()))
        for name in self.rules:
            self.rules[name] = [body for body in self.rules[name] if _needed(body) <= alive]

    def _text(self, start: str) -> str:
        reached, waiting = {start}, [start]
        lines = []
        while waiting:
            name = waiting.pop()
            bodies = dict.fromkeys(_line(body) for body in self.rules[name])
            lines.append(f"{name}{'::_' if name in self._parametric else ''}: " + " | ".join(bodies))
            for needed in (n for body in self.rules[name] for n in _rule_names(body)):
                if needed not in reached:
                    reached.add(needed)
                    waiting.append(needed)
        constants = [f"{name}: {pattern}" for name, pattern in _PUNCTUATION.items()]
        return "\n".join([f"start: {start}", *lines, *constants, *self._terminals.lines()]) + "\n"


def _line(body: Body) -> str:
    guard = [symbol for symbol in body if isinstance(symbol, str) and symbol[0] == "%"]
    symbols = [_written(symbol) for symbol in body if symbol not in guard]
    return " ".join((symbols or ['""']) + [str(symbol) for symbol in guard])


def _needed(body: Body) -> set[str]:
    """Rules without which the body has no text."""
    names = {symbol.partition("::")[0] for symbol in body if isinstance(symbol, str) and symbol[0] == "r"}
    return names.union(*(_needed(s.symbols) for s in body if isinstance(s, Repeated) and s.low > 0))


def _rule_names(body: Body) -> set[str]:
    names = {symbol.partition("::")[0] for symbol in body if isinstance(symbol, str) and symbol[0] == "r"}
    return names.union(*(_rule_names(s.symbols) for s in body if isinstance(s, Repeated)))


def _written(symbol: Symbol) -> str:
    if isinstance(symbol, str):
        return symbol
    inner = f"({' '.join(symbol.symbols)})"
    if symbol.high is None:
        return inner + ("*" if symbol.low == 0 else f"{{{symbol.low},}}")
    return '""' if symbol.high == 0 else f"{inner}{{{symbol.low},{symbol.high}}}"


def _escaped(characters: str) -> str:
    return "".join("\\" + c if c in "-." else c for c in sorted(characters))


def _number_pattern(value: Fraction) -> str:
    """The spellings of one number without exponent: zeros may follow the point."""
    sign = "-" if value < 0 else "-?" if value == 0 else ""
    whole, rest = divmod(abs(value), 1)
    digits = ""
    while rest:
        rest *= 10
        digits += str(int(rest))
        rest -= int(rest)
    return f"{sign}{whole}\\.{digits}0*" if digits else rf"{sign}{whole}(\.0)?"


_State = tuple[int, int, frozenset[int]]


class _ObjectWriter:
    """The inside of one object. A state is how many of the named properties are behind, how many properties there were (as far
    as it matters: up to 1, or up to what the limits ask), and which of the demanded pairs have been served.

        open(i)     others may come here
          └─► due(i)  the next property is one of the named ones from i on, or the end
    """

    def __init__(self, grammar: JsonGrammar, shape: Object) -> None:
        self._grammar = grammar
        self._shape = shape
        self._count_max = max(1, shape.low, 0 if shape.high is None else shape.high)
        self._plain = shape.high is None and shape.low <= 1 and not shape.pairs
        self._num_states = 0
        self._waiting: deque[tuple[str, str, _State]] = deque()
        self._named = tuple(grammar.number_of(member) for member in shape.named)
        self._around = grammar.number_of((shape.others, shape.low, shape.high, shape.pairs))

    def start(self) -> str:
        name = self._state("open", (0, 0, frozenset()))
        while self._waiting:
            rule, kind, state = self._waiting.popleft()
            self._grammar.rules[rule] = self._open(state) if kind == "open" else self._due(state)
        return name

    @property
    def can_be_any_order(self) -> bool:
        return self._shape.any_order and self._plain and len(self._shape.named) <= BITS

    def start_any_order(self) -> str:
        named = sorted(self._shape.named, key=lambda member: not member.required)
        items = [self._member(member, frozenset()) for member in named]
        others = tuple(self._member(other, frozenset()) for other in self._shape.others)
        needed = sum(member.required for member in named)
        name = self._grammar.each_once(items, others, f"is_ones([0:{needed}])" if needed else "", needed=needed)
        if not needed and self._shape.low:
            self._grammar.rules[name] = [body for body in self._grammar.rules[name] if body]
        return name

    def _state(self, kind: str, state: _State) -> str:
        index, count, served = state
        # What can follow depends on what is still to come alone, so objects that end alike share their rules.
        key = (kind, self._named[index:], self._around, count, served)
        if key not in self._grammar.shared:
            self._num_states += 1
            if self._num_states > OBJECT_STATES_MAX:
                raise GrammarError(PARAM, f"guided_json has an object whose limits need more than {OBJECT_STATES_MAX} states")
            self._grammar.shared[key] = self._grammar.rule([])
            self._waiting.append((self._grammar.shared[key], kind, state))
        return self._grammar.shared[key]

    def _open(self, state: _State) -> list[Body]:
        index, count, served = state
        due = self._state("due", state)
        if self._plain and count:
            return [(self._run_of_others(), due)] if self._shape.others else [(due,)]
        bodies: list[Body] = [(due,)]
        if self._may_add(count):
            for other in self._shape.others:
                for now, pair in self._ways(other):
                    following = self._state("open", (index, self._more(count), served | now))
                    bodies.append((*self._comma(count), pair, following))
        return bodies

    def _due(self, state: _State) -> list[Body]:
        index, count, served = state
        if index == len(self._shape.named):
            return [()] if count >= self._shape.low and len(served) == len(self._shape.pairs) else []
        member = self._shape.named[index]
        bodies: list[Body] = [] if member.required else [(self._state("due", (index + 1, count, served)),)]
        if self._may_add(count):
            for now, pair in self._ways(member):
                following = self._state("open", (index + 1, self._more(count), served | now))
                bodies.append((*self._comma(count), pair, following))
        return bodies

    def _may_add(self, count: int) -> bool:
        return self._shape.high is None or count < self._shape.high

    def _more(self, count: int) -> int:
        return min(count + 1, self._count_max)

    @staticmethod
    def _comma(count: int) -> tuple[str, ...]:
        return ("COMMA",) if count else ()

    def _ways(self, member: Member | OtherMembers) -> list[tuple[frozenset[int], str]]:
        """A property as it is, and as it serves each set of demanded pairs that it can."""
        found = []
        for size in range(len(member.pairs) + 1):
            for chosen in itertools.combinations(member.pairs, size):
                found.append((frozenset(chosen), self._member(member, frozenset(chosen))))
        return found

    def _member(self, member: Member | OtherMembers, serving: frozenset[int]) -> str:
        key = ("member", self._grammar.number_of(member), serving and (serving, self._around))
        if key not in self._grammar.shared:
            value = term((*member.value, *(each for i in sorted(serving) for each in self._shape.pairs[i].value)))
            names = literal(member.name) if isinstance(member, Member) else member.names
            body = (self._grammar.string(names), "COLON", self._grammar.value(value))
            self._grammar.shared[key] = self._grammar.rule([body])
        return self._grammar.shared[key]

    def _run_of_others(self) -> str:
        """Any number of other properties, each after a comma; left-recursive, which the parser likes."""
        key = ("others", self._around)
        if key not in self._grammar.shared:
            name = self._grammar.rule([])
            self._grammar.shared[key] = name
            others = [self._member(other, frozenset()) for other in self._shape.others]
            self._grammar.rules[name] = [(), *((name, "COMMA", other) for other in others)]
        return self._grammar.shared[key]


class _ArrayWriter:
    """The inside of an array in which some items are counted. A state is the number of items so far and of each kind counted,
    as far as they matter."""

    def __init__(self, grammar: JsonGrammar, shape: Array) -> None:
        self._grammar = grammar
        self._shape = shape
        self._length_max = max(1, shape.low, len(shape.first), 0 if shape.high is None else shape.high)
        self._known: dict[tuple[int, ...], str] = {}
        self._waiting: deque[tuple[int, ...]] = deque()

    def start(self) -> str:
        name = self._state((0,) * (1 + len(self._shape.counted)))
        while self._waiting:
            state = self._waiting.popleft()
            self._grammar.rules[self._known[state]] = self._bodies(state)
        return name

    def _state(self, state: tuple[int, ...]) -> str:
        if state not in self._known:
            if len(self._known) > OBJECT_STATES_MAX:
                raise GrammarError(PARAM, f"guided_json has an array whose limits need more than {OBJECT_STATES_MAX} states")
            self._known[state] = self._grammar.rule([])
            self._waiting.append(state)
        return self._known[state]

    def _bodies(self, state: tuple[int, ...]) -> list[Body]:
        shape, (length, *counts) = self._shape, state
        enough = all(count >= each.low for count, each in zip(counts, shape.counted, strict=True))
        bodies: list[Body] = [()] if length >= shape.low and enough else []
        if shape.high is not None and length >= shape.high:
            return bodies
        item = shape.first[length] if length < len(shape.first) else shape.others
        for hits in itertools.product((False, True), repeat=len(counts)):
            literals, following = list(item), [min(length + 1, self._length_max)]
            for hit, count, each in zip(hits, counts, shape.counted, strict=True):
                literals += each.value if hit else each.opposite if each.high is not None else ()
                top = each.low if each.high is None else each.high + 1
                following.append(min(count + hit, top))
            if all(each.high is None or n <= each.high for n, each in zip(following[1:], shape.counted, strict=True)):
                value = self._grammar.value(term(literals))
                bodies.append((*(("COMMA",) if length else ()), value, self._state(tuple(following))))
        return bodies
