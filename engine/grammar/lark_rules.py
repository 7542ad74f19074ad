"""Rules of a Lark grammar as data: named, shared, pruned of unproductive rules, then written. Knows the library's syntax."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import Any

from engine.grammar.regex import Regex
from engine.grammar.schema_nodes import PARAM
from engine.grammar.spec import GrammarError
from engine.grammar.terminals import Terminals

RULES_MAX = 60_000


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
"""Items that a rule's parameter can track; the library has 64 bits, and comparisons need some values beyond the items."""


class Rules:
    """The rules and terminals of one grammar. `memo` maps the purpose of a rule to its name; callers choose the keys."""

    def __init__(self) -> None:
        self.terminals = Terminals()
        self.rules: dict[str, list[Body]] = {}
        self.memo: dict[tuple[Any, ...], str] = {}
        self._parametric: set[str] = set()
        self._extra_dependencies: dict[str, set[str]] = {}
        self._interned: dict[Any, int] = {}
        self._count = itertools.count()

    def rule(self, bodies: list[Body]) -> str:
        name = f"r{next(self._count)}"
        self.rules[name] = bodies
        if len(self.rules) > RULES_MAX:
            raise GrammarError(PARAM, f"the schema needs more than {RULES_MAX} rules")
        return name

    def intern(self, value: Any) -> int:
        """A number for a value, the same for equal values. Parts of shapes are trees, which are slow to compare repeatedly."""
        return self._interned.setdefault(value, len(self._interned))

    def string(self, language: Regex) -> str:
        return self.terminals.name(self.terminals.json_string(language), "S")

    def each_once(self, items: list[str], others: tuple[str, ...], end_if: str, high: int = BITS, needed: int = 0) -> str:
        """A list of `items`, each at most once and in any order, and of `others`; at most `high` ≥ 1 items. It may end
        where `end_if` holds. The rule's parameter has a bit for every item used; the first `needed` items are required."""
        rest, start = self.rule([]), self.rule([])
        self._parametric.add(rest)
        firsts: list[Body] = []
        followers: list[Body] = [(f"%if {end_if}",) if end_if else ()]
        for bit, item in enumerate(items):
            firsts.append((item, f"{rest}::{hex(1 << bit)}"))
            is_unused = f"bit_clear({bit})"
            guard = f"and({is_unused}, bit_count_lt(_, {high}))" if high < len(items) else is_unused
            followers.append(("COMMA", item, f"{rest}::set_bit({bit})", f"%if {guard}"))
        for other in others:
            firsts.append((other, f"{rest}::0x0"))
            followers.append(("COMMA", other, f"{rest}::_"))
        if not end_if:
            firsts.append(())
        self.rules[rest], self.rules[start] = followers, firsts
        self._extra_dependencies[start] = set(items[:needed])
        return start

    def drop_unproductive(self) -> None:
        """Remove bodies that name a rule without any finite text, until none is left, and its repetitions, which occur zero
        times."""
        users: dict[str, set[str]] = {}
        for name, bodies in self.rules.items():
            dependencies = self._extra_dependencies.get(name, set()).union(*map(_dependencies, bodies))
            for dependency in dependencies:
                users.setdefault(dependency, set()).add(name)
        productive = set[str]()
        worklist = deque(self.rules)
        while worklist:
            name = worklist.popleft()
            has_extras = self._extra_dependencies.get(name, set()) <= productive
            if name not in productive and has_extras and any(_dependencies(body) <= productive for body in self.rules[name]):
                productive.add(name)
                worklist.extend(users.get(name, ()))
        for name in self.rules:
            kept = (body for body in self.rules[name] if _dependencies(body) <= productive)
            self.rules[name] = [
                tuple(s for s in body if not isinstance(s, Repeated) or _rule_names((s,)) <= productive) for body in kept
            ]

    def text(self, start: str, terminals: dict[str, str]) -> str:
        reached, worklist = {start}, [start]
        lines = []
        while worklist:
            name = worklist.pop()
            bodies = dict.fromkeys(_body_text(body) for body in self.rules[name])
            lines.append(f"{name}{'::_' if name in self._parametric else ''}: " + " | ".join(bodies))
            for reference in (n for body in self.rules[name] for n in sorted(_rule_names(body))):
                if reference not in reached:
                    reached.add(reference)
                    worklist.append(reference)
        constants = [f"{name}: {pattern}" for name, pattern in terminals.items()]
        return "\n".join([f"start: {start}", *lines, *constants, *self.terminals.lines()]) + "\n"


def comma(before: object) -> tuple[str, ...]:
    """The comma in front of a member or an item, if there is one before it: any number but zero, any list but an empty one."""
    return ("COMMA",) if before else ()


def _body_text(body: Body) -> str:
    return " ".join(map(_symbol_text, body)) or '""'


def _dependencies(body: Body) -> set[str]:
    """Rules without which the body has no text: not those that may occur zero times."""
    return _rule_names(tuple(s for s in body if not (isinstance(s, Repeated) and s.low == 0)))


def _rule_names(body: Body) -> set[str]:
    names = {symbol.partition("::")[0] for symbol in body if isinstance(symbol, str) and symbol[0] == "r"}
    return names.union(*(_rule_names(s.symbols) for s in body if isinstance(s, Repeated)))


def _symbol_text(symbol: Symbol) -> str:
    if isinstance(symbol, str):
        return symbol
    inner = f"({' '.join(symbol.symbols)})"
    if symbol.high is None:
        return inner + ("*" if symbol.low == 0 else f"{{{symbol.low},}}")
    return '""' if symbol.high == 0 else f"{inner}{{{symbol.low},{symbol.high}}}"
