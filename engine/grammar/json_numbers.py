"""Writes the numbers of a JSON grammar: each as one terminal, or all of them character by character.

The library's lexer takes the longest match. Where one alternative reads a number as a whole and another reads its first digit,
only the former would be followed. One terminal costs less; so numbers are written by character only in a grammar with an
automaton that makes too large an expression, such as that of the multiples of 97.

A terminal is the intersection of terminals of its bounds and of each multiple, which alternatives share: the lexer's states are
then products of few small sets.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from fractions import Fraction

from engine.grammar.lark_rules import Body, Rules
from engine.grammar.numbers import Automaton, NumberError, Numbers, build_automaton, is_empty
from engine.grammar.schema_nodes import PARAM
from engine.grammar.spec import GrammarError
from engine.grammar.terminals import Terminals

DETOURS_MAX = 1_000
"""Most ways around eliminated states in the expression of an automaton. Multiples of n have up to a third of the cube of n, and
the lexer makes up to 2 ** n states of them."""

_ANY = Numbers()
_WHOLE = Numbers(multiples=(Fraction(1),), is_whole=True)
_PATTERNS = {
    _WHOLE: "-?(0|[1-9][0-9]*)",
    # Exponents stop before the range of a 64-bit float is exceeded.
    _ANY: r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?0*([0-9]|[1-9][0-9]|[12][0-9][0-9]))?",
}


class NumberWriter:
    """The numbers of one grammar. Their rules get their bodies when all numbers are known."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._names: dict[Numbers, str] = {}
        self._constant_names: dict[tuple[type, int | Fraction], str] = {}

    def rule(self, numbers: Numbers) -> str:
        """The rule of any one of these numbers."""
        if numbers not in self._names:
            self._names[numbers] = self._rules.rule([])
        return self._names[numbers]

    def constant(self, value: int | Fraction) -> str:
        """The rule of one number. Decimals may end in zeros; an integer of the schema has no decimals."""
        key = (type(value), value)  # 1 equals Fraction(1)
        if key not in self._constant_names:
            self._constant_names[key] = self._rules.rule([])
        return self._constant_names[key]

    def write_bodies(self) -> None:
        """Raises `GrammarError` for numbers that need too many states."""
        try:
            self._write_bodies()
        except NumberError as error:
            raise GrammarError(PARAM, f"the schema cannot be enforced: {error}") from error

    def _write_bodies(self) -> None:
        expressions = _Expressions(copy.deepcopy(self._rules.terminals))
        sets = [numbers for numbers in self._names if numbers not in _PATTERNS and not is_empty(numbers)]
        try:
            terminals = {numbers: expressions.of(numbers) for numbers in sets}
        except _TooLarge:
            self._write_by_character()
            return
        self._rules.terminals = expressions.terminals
        terminals |= {numbers: self._pattern(pattern) for numbers, pattern in _PATTERNS.items() if numbers in self._names}
        for numbers, terminal in terminals.items():
            self._rules.rules[self._names[numbers]] = [(terminal,)]
        for (_, value), name in self._constant_names.items():
            self._rules.rules[name] = [(self._pattern(_constant_pattern(value)),)]

    def _pattern(self, pattern: str) -> str:
        return self._rules.terminals.name(f"/{pattern}/", "N")

    def _write_by_character(self) -> None:
        for numbers, name in self._names.items():
            self._write_automaton(name, _any_automaton() if numbers == _ANY else build_automaton(numbers))
        for (_, value), name in self._constant_names.items():
            self._write_automaton(name, _constant_automaton(value))

    def _write_automaton(self, name: str, automaton: Automaton) -> None:
        """A rule for each state: a character, then the rule of the next state."""
        names = [name, *(self._rules.rule([]) for _ in automaton.edges[1:])]
        for state, edges in enumerate(automaton.edges):
            bodies: list[Body] = [(self._rules.terminals.name(step, "D"), names[n]) for n, step in _steps(edges)]
            if state in automaton.accepting:
                bodies.append(())
            self._rules.rules[names[state]] = bodies


class _TooLarge(Exception):
    """An automaton has too many states or cycles to be written as one expression."""


class _Expressions:
    """Automata as expressions by the elimination of states (Kleene). Parts are `terminals` of their own, so they are shared."""

    def __init__(self, terminals: Terminals) -> None:
        self.terminals = terminals
        self._names: dict[Numbers, str] = {}

    def of(self, numbers: Numbers) -> str:
        """The terminal of numbers, of which there are some. Raises `_TooLarge`."""
        return self.terminals.name(" & ".join(self._sets(numbers)), "N")

    def _sets(self, numbers: Numbers) -> list[str]:
        """Sets whose intersection is `numbers`."""
        multiples = [q for q in numbers.multiples if not (q == 1 and numbers.is_whole)]
        rest = replace(numbers, multiples=(Fraction(1),) if numbers.is_whole else (), non_multiples=())
        sets = [self._terminal(Numbers(multiples=(q,))) for q in multiples]
        if not multiples or not rest.is_free:
            sets.append(self._terminal(rest))
        return sets + [f"~{self._terminal(Numbers(multiples=(q,)))}" for q in numbers.non_multiples]

    def _terminal(self, numbers: Numbers) -> str:
        """The terminal of the automaton of numbers, which alternatives share."""
        if numbers not in self._names:
            self._names[numbers] = self._eliminated(build_automaton(numbers))
        return self._names[numbers]

    def _eliminated(self, automaton: Automaton) -> str:
        """The terminal of an automaton, whose states are eliminated one after the other."""
        # A text of a state is a step and a text of the state that it leads to, or one of the state's ends.
        steps = [{following: [step] for following, step in _steps(edges)} for edges in automaton.edges]
        ends = [['""'] if state in automaton.accepting else [] for state in range(len(steps))]
        predecessors: list[set[int]] = [set() for _ in steps]
        for state, by_following in enumerate(steps):
            for following in by_following:
                predecessors[following].add(state)
        num_detours = 0
        for state in _postorder(steps):
            loop = f"({' | '.join(steps[state].pop(state))})*" if state in steps[state] else ""
            end = self._part(loop, ends[state])
            leaving = {following: self._part(loop, parts) for following, parts in steps[state].items()}
            for following in leaving:
                predecessors[following].discard(state)
            for before in predecessors[state] - {state}:
                step = self._part("", steps[before].pop(state))
                if end:
                    ends[before].append(f"{step} {end}")
                for following, rest in leaving.items():
                    steps[before].setdefault(following, []).append(f"{step} {rest}")
                    predecessors[following].add(before)
                num_detours += len(leaving)
                if num_detours > DETOURS_MAX:
                    raise _TooLarge
        return end

    def _part(self, loop: str, alternatives: list[str]) -> str:
        """The name of a loop with one of the alternatives after it; empty if there is none."""
        if not alternatives:
            return ""
        return self.terminals.name(f"{loop} ({' | '.join(alternatives)})".strip(), "N")


def _postorder(steps: list[dict[int, list[str]]]) -> list[int]:
    """The states, each after those that it leads to as far as there is no cycle; the start, state 0, is the last."""
    order: list[int] = []
    seen, stack = {0}, [(0, iter(steps[0]))]
    while stack:
        unseen = next((state for state in stack[-1][1] if state not in seen), None)
        if unseen is None:
            order.append(stack.pop()[0])
        else:
            seen.add(unseen)
            stack.append((unseen, iter(steps[unseen])))
    return order


def _steps(edges: dict[str, int]) -> list[tuple[int, str]]:
    """The states that edges lead to, each with the class of the characters that do."""
    characters: dict[int, str] = {}
    for character, following in edges.items():
        characters[following] = characters.get(following, "") + character
    return [(following, f"/[{_escaped(c)}]/") for following, c in characters.items()]


def _escaped(characters: str) -> str:
    return "".join("\\" + c if c in "-." else c for c in sorted(characters))


def _digits(value: int | Fraction) -> str:
    """The shortest spelling of the magnitude."""
    whole, fraction = divmod(abs(Fraction(value)), 1)
    digits = f"{whole}." if fraction else f"{whole}"
    while fraction:
        fraction *= 10
        digits += str(int(fraction))
        fraction -= int(fraction)
    return digits


def _constant_pattern(value: int | Fraction) -> str:
    sign = "-?" if not value else "-" * (value < 0)
    digits = _digits(value).replace(".", r"\.")
    if isinstance(value, int):
        return f"{sign}{digits}"
    return f"{sign}{digits}0*" if "." in digits else rf"{sign}{digits}(\.0+)?"


def _constant_automaton(value: int | Fraction) -> Automaton:
    """Reads what `_constant_pattern` matches."""
    spelling = "-" * (value <= 0) + _digits(value)
    end = len(spelling)
    automaton = Automaton([{character: state + 1} for state, character in enumerate(spelling)] + [{}], {end})
    if not value:
        automaton.edges[0]["0"] = end
    if isinstance(value, Fraction) and "." in spelling:
        automaton.edges[end]["0"] = end
    elif isinstance(value, Fraction):
        automaton.edges[end]["."] = end + 1
        automaton.edges += [{"0": end + 2}, {"0": end + 2}]
        automaton.accepting.add(end + 2)
    return automaton


def _any_automaton() -> Automaton:
    """Reads what the pattern of any number matches: a number without exponent, then perhaps an exponent."""
    automaton = build_automaton(_ANY)
    start = len(automaton.edges)
    for state in automaton.accepting:
        automaton.edges[state] |= dict.fromkeys("eE", start)
    unsigned, zeros, one_or_two, tens, end = range(start + 1, start + 6)
    digits = "0123456789"
    first = {"0": zeros} | dict.fromkeys("12", one_or_two) | dict.fromkeys("3456789", tens)
    automaton.edges += [
        dict.fromkeys("+-", unsigned) | first,
        first,
        first,
        dict.fromkeys(digits, tens),
        dict.fromkeys(digits, end),
        {},
    ]
    automaton.accepting |= {zeros, one_or_two, tens, end}
    return automaton
