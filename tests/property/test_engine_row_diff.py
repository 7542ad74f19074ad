"""Rows removed from a row list: without them the old list is a prefix of the new one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.row_diff import removed_rows, without_rows

row_lists = st.lists(st.integers(1000, 1099), unique=True, max_size=20)


@given(before=row_lists, removed=st.sets(st.integers(0, 19)), num_new=st.integers(0, 5))
def test_removed_rows_are_found_if_the_others_keep_their_order(before: list[int], removed: set[int], num_new: int) -> None:
    rows = sorted(row for row in removed if row < len(before))
    remaining = [each for row, each in enumerate(before) if row not in removed]
    assert removed_rows(before, [*remaining, *range(num_new)]) == rows
    assert without_rows(before, rows) == remaining


@given(before=row_lists, after=row_lists)
def test_remaining_rows_are_a_prefix_of_any_new_list(before: list[int], after: list[int]) -> None:
    objects = {each: object() for each in (*before, *after)}
    rows = removed_rows([objects[each] for each in before], [objects[each] for each in after])
    remaining = without_rows(before, rows)
    assert rows == sorted({*rows})
    assert after[: len(remaining)] == remaining
