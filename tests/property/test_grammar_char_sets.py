"""Sets of code points as ranges, compared with sets that list every one, and with Python's classes."""

from __future__ import annotations

import re
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.grammar import char_sets
from engine.grammar.char_sets import LAST, CharSet

# Operations are decided at the ends of ranges: here around the surrogates, and at both ends of Unicode.
EDGES = (*range(12), *range(0xD7FA, 0xD804), *range(0xDFFA, 0xE006), *range(LAST - 6, LAST + 1))
CHARACTERS = frozenset(EDGES).difference(range(0xD800, 0xE000))
CLASSIFIED = frozenset((*range(0x3100), *range(0xE000, 0x10000), *range(0x1D400, 0x1D800)))
NEAR_LIMITS = st.sampled_from(EDGES)
RANGES = st.lists(st.tuples(NEAR_LIMITS, NEAR_LIMITS).map(lambda ends: (min(ends), max(ends))), max_size=4)


def members(ranges: CharSet | list[tuple[int, int]], universe: frozenset[int] = CHARACTERS) -> frozenset[int]:
    return frozenset(point for point in universe if any(low <= point <= high for low, high in ranges))


def is_canonical(ranges: CharSet) -> bool:
    """Sorted, not empty, and with a code point between any two, except the two sides of the surrogates."""
    are_apart = all(before[1] + 1 < after[0] for before, after in pairwise(ranges))
    return are_apart and all(low <= high for low, high in ranges)


@given(RANGES, RANGES)
@example([], [])
@example([(0, LAST)], [(0, 0)])
def test_operations_on_ranges_are_those_on_sets(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    one, other = char_sets.chars(*left), char_sets.chars(*right)
    for result, expected in [
        (one, members(left)),
        (char_sets.union(one, other), members(left) | members(right)),
        (char_sets.intersect(one, other), members(left) & members(right)),
        (char_sets.complement(one), CHARACTERS - members(left)),
    ]:
        assert members(result) == expected
        assert is_canonical(result)


@pytest.mark.parametrize("letter", "dws")
def test_a_narrow_class_is_what_all_dialects_agree_on_and_a_wide_one_what_any_has(letter: str) -> None:
    in_python = {point for point in CLASSIFIED if re.match(rf"\{letter}", chr(point))}
    ascii_only = {point for point in range(128) if re.match(rf"\{letter}", chr(point), re.ASCII)}
    in_javascript = ascii_only
    if letter == "s":  # ECMA-262, 22.2.2.9: WhiteSpace or LineTerminator
        spaces = {point for point in CLASSIFIED if unicodedata.category(chr(point)) == "Zs"}
        in_javascript = spaces | set(map(ord, "\t\n\v\f\r\ufeff\u2028\u2029"))
    assert members(char_sets.named(letter, wide=True), CLASSIFIED) == in_python | in_javascript
    assert members(char_sets.named(letter, wide=False), CLASSIFIED) == in_python & in_javascript


@pytest.mark.parametrize("name", ["L", "Nd"])
def test_a_category_has_its_characters(name: str) -> None:
    in_unicode = {point for point in CLASSIFIED if unicodedata.category(chr(point)).startswith(name)}
    assert members(char_sets.category(name) or (), CLASSIFIED) == in_unicode


@pytest.mark.parametrize("name", ["", "l", "Lx", "Cs", "LuX", "Letter", "Lu "])
def test_there_are_no_other_categories(name: str) -> None:
    assert char_sets.category(name) is None
