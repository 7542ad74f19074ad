"""Automata of numbers under bounds, multiples and exceptions."""

from __future__ import annotations

import itertools
import time
from fractions import Fraction

import pytest

from engine.grammar.numbers import Automaton, Bound, Numbers, build_automaton, is_empty


def reads(automaton: Automaton, text: str) -> bool:
    state = 0
    for character in text:
        if character not in automaton.edges[state]:
            return False
        state = automaton.edges[state][character]
    return state in automaton.accepting


@pytest.mark.parametrize(
    "numbers",
    [
        Numbers(excluded=tuple(map(Fraction, ("0", "3", "-3", "12", "12.5", "-120", "0.05")))),
        Numbers(lows=(Bound(Fraction(-13), False),), highs=(Bound(Fraction(125, 10), True),), excluded=(Fraction(-1),)),
        Numbers(lows=(Bound(Fraction(3), True), Bound(Fraction(-40), False)), multiples=(Fraction(3, 2),)),
        Numbers(highs=(Bound(Fraction(-1, 20), False),), non_multiples=(Fraction(3),), excluded=(Fraction(-12),)),
        Numbers(highs=(Bound(Fraction(1, 2), True),)),
    ],
    ids=["exceptions", "bounds", "multiples", "non-multiples", "a bound below 1"],
)
def test_an_automaton_reads_exactly_the_numbers_of_its_set(numbers: Numbers) -> None:
    automaton = build_automaton(numbers)
    wholes = [*range(21), 30, 39, 40, 41, 119, 120, 121, 125]
    parts = ("", ".0", ".05", ".5", ".50", ".501")
    texts = ["".join(text) for text in itertools.product(("", "-"), map(str, wholes), parts)]
    assert [text for text in texts if reads(automaton, text)] == [text for text in texts if numbers.holds(Fraction(text))]


def test_hundreds_of_excluded_numbers_cost_an_automaton_little_time() -> None:
    start_s = time.thread_time()
    automaton = build_automaton(Numbers(excluded=tuple(Fraction(37 * n + 5) for n in range(286))))
    assert time.thread_time() - start_s < 1.0
    assert not reads(automaton, "79")
    assert reads(automaton, "80")


def multiples_of_3(low: int, high: int, *excluded: Fraction) -> Numbers:
    lows, highs = (Bound(Fraction(low), False),), (Bound(Fraction(high), False),)
    return Numbers(lows, highs, multiples=(Fraction(3),), excluded=excluded)


def test_few_large_numbers_are_enumerated() -> None:
    assert multiples_of_3(1000, 1008).enumerated() == [Fraction(1002), Fraction(1005), Fraction(1008)]


@pytest.mark.parametrize(
    ("numbers", "has_members"),
    [
        (Numbers(multiples=(Fraction(6),), non_multiples=(Fraction(4),)), True),
        (Numbers(multiples=(Fraction(6), Fraction(4)), non_multiples=(Fraction(3),)), False),
        (Numbers(multiples=(Fraction(1),), non_multiples=(Fraction(1, 2),)), False),
        (Numbers(lows=(Bound(Fraction(7), True),), non_multiples=(Fraction(1, 2),), excluded=(Fraction(8),)), True),
        (multiples_of_3(-7, -5), True),
        (multiples_of_3(4, 5), False),
        (multiples_of_3(3, 5, Fraction(3)), False),
    ],
)
def test_a_set_of_numbers_is_empty_if_its_automaton_reads_nothing(numbers: Numbers, has_members: bool) -> None:
    assert bool(build_automaton(numbers).accepting) is has_members
    assert is_empty(numbers) is not has_members
