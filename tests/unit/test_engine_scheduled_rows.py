"""Rows of a step: equal inputs of the forward pass from both runners, and the rows that sample."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import SamplingParams
from engine.runner.scheduled_rows import (
    DEVICE_TOKEN,
    PlainStepRows,
    SlotStepRows,
    device_token_indices,
    draft_token_indices,
    group_rows,
    token_span,
)
from engine.runner.token_spans import forward_order
from engine.scheduling.request import UNKNOWN_TOKEN, Request, table_of
from engine.scheduling.scheduled_batch import ScheduledRequest

PROMPT = [7, 0, 9, 4, 2, 8]


def request(*, num_outputs: int = 0, prompt_logprobs: int | None = None, index: int = 0) -> Request:
    return Request(
        request_id="a",
        tenant_id="alice",
        index=index,
        sampling=SamplingParams(seed=1, max_tokens=100, prompt_logprobs=prompt_logprobs),
        token_ids=[*PROMPT, *range(num_outputs)],
        num_prompt_tokens=len(PROMPT),
        max_total_tokens=100,
        stop_ids=frozenset(),
        arrived_s=0.0,
        block_table=table_of([3, 5]),
    )


def decode(num_outputs: int, draft_ids: list[int] | None = None, **of: Any) -> ScheduledRequest:
    answer = request(num_outputs=num_outputs, **of)
    draft_ids = draft_ids or []
    return ScheduledRequest(answer, answer.num_tokens - 1, 1 + len(draft_ids), True, len(draft_ids), draft_ids)


def chunk(start: int, end: int, **of: Any) -> ScheduledRequest:
    return ScheduledRequest(request(**of), start, end - start, end == len(PROMPT))


STEPS = [
    decode(1),
    decode(4),
    decode(2, [11, 12]),
    decode(3, [11], prompt_logprobs=2),
    decode(1, prompt_logprobs=0),
    chunk(0, 4),
    chunk(2, 6),
    chunk(5, 6),
    chunk(3, 4),
    chunk(0, 4, prompt_logprobs=1),
    chunk(2, 6, prompt_logprobs=1),
    chunk(5, 6, prompt_logprobs=1),
    chunk(0, 6, prompt_logprobs=1, index=1),
]


def test_both_runners_compute_the_same_rows() -> None:
    rows = PlainStepRows.of(STEPS)
    for item, row in zip(STEPS, rows.spans, strict=True):
        made = token_span(item)
        assert (
            [*row.token_ids]
            == [*made.token_ids]
            == (item.request.token_ids + item.draft_token_ids)[item.start :][: item.num_tokens]
        )
        assert row.start == made.start
        assert row.block_table is made.block_table is item.request.block_table
        assert [*row.outputs][: len(made.outputs)] == [*made.outputs], "rows that choose come before those that are scored"


def test_hidden_states_are_returned_per_request_with_sampled_rows_first() -> None:
    rows = PlainStepRows.of(STEPS)
    first = 0
    for index, (item, row) in enumerate(zip(STEPS, rows.spans, strict=True)):
        chosen = [rows.hidden_rows[row_index] for row_index in rows.sampled_ranges[index]]
        assert [*chosen, *rows.scored_ranges[index]] == [*range(first, first + len(row.outputs))]
        assert len(chosen) == (1 + item.num_draft_tokens) * item.samples
        assert [rows.sampled[row_index].position for row_index in rows.sampled_ranges[index]] == [
            item.request.num_tokens + depth for depth in range(len(chosen))
        ]
        first += len(row.outputs)
    assert rows.num_outputs == first


@pytest.mark.parametrize(
    ("start", "end", "predicted"), [(0, 4, [1, 2, 3, 4]), (2, 6, [3, 4, 5]), (5, 6, []), (0, 6, [1, 2, 3, 4, 5])]
)
def test_each_prompt_token_except_the_first_is_scored_by_the_row_before(start: int, end: int, predicted: list[int]) -> None:
    rows = PlainStepRows.of([chunk(start, end, prompt_logprobs=1)])
    (row,), (scored,), (scored_from,) = rows.spans, rows.scored_ranges, rows.scored_starts
    assert [start + output + 1 for output in [*row.outputs][len(rows.hidden_rows) :]] == predicted
    assert [*range(scored_from, scored_from + len(scored))] == predicted or not scored


def test_the_plain_runner_refuses_tokens_known_only_to_the_device() -> None:
    item = decode(2, [1, 2])
    item.draft_token_ids = []
    with pytest.raises(AssertionError, match="drafts"):
        PlainStepRows.of([item])
    unknown = decode(2, prompt_logprobs=1)
    unknown.request.token_ids[-1] = UNKNOWN_TOKEN
    with pytest.raises(AssertionError, match="last token"):
        PlainStepRows.of([unknown])


def test_indices_of_tokens_known_only_to_the_device_follow_the_order_of_the_pass() -> None:
    items = [decode(1), decode(5), decode(3, [1, 2]), chunk(0, 4), decode(2), decode(4, [6])]
    for item in items[::2]:
        if not item.num_draft_tokens:
            item.request.token_ids[-1] = UNKNOWN_TOKEN
    items[2].draft_token_ids = []
    rows = [token_span(item) for item in items]
    tokens = [token_id for row in forward_order(rows) for token_id in rows[row].token_ids]
    assert forward_order(rows) == [1, 4, 0, 2, 3, 5]
    assert device_token_indices(rows) == {1: 4, 2: 0}
    assert rows[0].token_ids is DEVICE_TOKEN
    assert draft_token_indices(items, rows) == [4, 5, 11]
    assert [tokens[index] for index in draft_token_indices(items, rows)] == [0, 0, 6]


def test_a_known_token_0_is_not_taken_for_an_unknown_one() -> None:
    item = decode(1)
    assert item.request.token_ids[-1] == 0
    assert device_token_indices([token_span(item)]) == {}


@given(depths=st.lists(st.integers(0, 3), max_size=6), known=st.booleans())
def test_sampled_rows_follow_the_last_token_and_each_draft(depths: list[int], known: bool) -> None:
    items = [decode(1 + number, [20 + index for index in range(depth)]) for number, depth in enumerate(depths)]
    if not known:
        for item in items:
            item.draft_token_ids = []
    slots = [10 + number for number in range(len(items))]
    rows = SlotStepRows.of(items, slots)
    expected = [
        (item, slot, depth) for item, slot in zip(items, slots, strict=True) for depth in range(1 + item.num_draft_tokens)
    ]
    assert rows.items == [item for item, _, _ in expected]
    assert rows.slots == [slot for _, slot, _ in expected]
    assert rows.positions == [item.request.num_tokens + depth for item, _, depth in expected]
    tokens = [(item.request.token_ids[-1:] + item.draft_inputs)[depth] for item, _, depth in expected]
    assert rows.tokens == (tokens if any(depths) else []), "without drafts they are in the slots"
    firsts = [row for row, (_, _, depth) in enumerate(expected) if depth == 0]
    assert rows.depths == {row: depth for row, depth in zip(firsts, depths, strict=True) if depth}
    assert rows.draft_rows == [row for row, (_, _, depth) in enumerate(expected) if depth]


requests = st.lists(st.tuples(st.integers(1, 20), st.integers(20, 99)), min_size=1, max_size=6)


@given(requests=requests, num_padding=st.integers(0, 20), group_size=st.integers(1, 9))
def test_rows_of_a_request_form_as_few_groups_as_possible(
    requests: list[tuple[int, int]], num_padding: int, group_size: int
) -> None:
    """`requests`: the number of rows of each, and the context length of its last row."""
    slots = [slot for slot, (count, _) in enumerate(requests) for _ in range(count)] + [-1] * num_padding
    lens = [length - behind for count, length in requests for behind in reversed(range(count))] + [0] * num_padding
    owners, group_lens, ends = group_rows(slots, lens, group_size)
    assert len(owners) == len(group_lens) == len(ends) == len(slots), "there may be one for each row"
    starts = [0, *ends[:-1]]
    rows = [range(start, end) for start, end in zip(starts, ends, strict=True)]
    assert [row for group in rows for row in group] == list(range(len(slots)))
    num_groups = sum(-(-count // group_size) for count, _ in requests) + -(-num_padding // group_size)
    assert [len(group) > 0 for group in rows] == [index < num_groups for index in range(len(slots))]
    for owner, length, group in zip(owners, group_lens, rows, strict=True):
        assert len(group) <= group_size
        assert all(slots[row] == owner for row in group)
        assert length == (lens[group[-1]] if group else 0)
