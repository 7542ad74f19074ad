"""Departures between two row lists: without those that left, the first list is a prefix of the second."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.row_diff import removed_rows, without_rows

people = st.lists(st.integers(1000, 1099), unique=True, max_size=20)


@given(before=people, gone=st.sets(st.integers(0, 19)), new=st.integers(0, 5))
def test_who_left_is_found_when_others_stay_in_their_order(before: list[int], gone: set[int], new: int) -> None:
    rows = sorted(row for row in gone if row < len(before))
    stayed = [each for row, each in enumerate(before) if row not in gone]
    assert removed_rows(before, [*stayed, *range(new)]) == rows
    assert without_rows(before, rows) == stayed


@given(before=people, after=people)
def test_whatever_has_happened_those_who_stayed_are_the_front(before: list[int], after: list[int]) -> None:
    names = {each: object() for each in (*before, *after)}
    rows = removed_rows([names[each] for each in before], [names[each] for each in after])
    stayed = without_rows(before, rows)
    assert rows == sorted({*rows})
    assert after[: len(stayed)] == stayed
