"""Rows of a step that are attended together: all of them once, in their order, and no two requests in one group."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.runner.choosing_rows import row_groups

requests = st.lists(st.tuples(st.integers(1, 20), st.integers(20, 99)), min_size=1, max_size=6)


@given(requests=requests, num_padding=st.integers(0, 20), together=st.integers(1, 9))
def test_rows_of_one_request_are_in_as_few_groups_as_there_can_be(
    requests: list[tuple[int, int]], num_padding: int, together: int
) -> None:
    """requests: rows, and the length of the last one's context"""
    slots = [slot for slot, (count, _) in enumerate(requests) for _ in range(count)] + [-1] * num_padding
    lens = [length - behind for count, length in requests for behind in reversed(range(count))] + [0] * num_padding
    owners, group_lens, ends = row_groups(slots, lens, together)
    assert len(owners) == len(group_lens) == len(ends) == len(slots), "there may be one for each row"
    starts = [0, *ends[:-1]]
    rows = [range(start, end) for start, end in zip(starts, ends, strict=True)]
    assert [row for group in rows for row in group] == list(range(len(slots)))
    num_groups = sum(-(-count // together) for count, _ in requests) + -(-num_padding // together)
    assert [len(group) > 0 for group in rows] == [index < num_groups for index in range(len(slots))]
    for owner, length, group in zip(owners, group_lens, rows, strict=True):
        assert len(group) <= together
        assert all(slots[row] == owner for row in group)
        assert length == (lens[group[-1]] if group else 0)
