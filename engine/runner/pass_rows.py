"""Rows of a forward pass in which some tokens are known to the device alone: the last one of a decode whose step was launched
behind another, and the guesses of a draft model."""

from __future__ import annotations

from collections.abc import Sequence

from engine.runner.batch_inputs import InputRow, forward_order
from engine.runner.step_rows import FIRST, NONE
from engine.scheduling.scheduled_batch import ScheduledRequest

UNKNOWN = (0,)
"""Stands for one token that the device puts in: token 0, which every vocabulary has. A known token 0 is a list."""


def input_row(item: ScheduledRequest) -> InputRow:
    """What a step computes of `item`, with token 0 for each that is not known."""
    request, start, end = item.request, item.start, item.start + item.num_tokens
    token_ids: Sequence[int] = request.token_ids[start:end]
    outputs = NONE
    if item.samples:
        if item.num_tokens == 1:
            return InputRow(UNKNOWN if token_ids[0] < 0 else token_ids, start, request.block_table, FIRST)
        if item.num_draft_tokens:
            token_ids = [*token_ids, *item.draft_inputs]
        outputs = range(item.num_tokens - item.num_draft_tokens - 1, item.num_tokens)
    return InputRow(token_ids, start, request.block_table, outputs)


def unknown_places(rows: Sequence[InputRow]) -> dict[int, int]:
    """Where the tokens of rows that are `UNKNOWN` stand among all tokens of the pass, with the row of each."""
    return {place: row for place, row in enumerate(forward_order(rows)) if rows[row].token_ids == UNKNOWN}


def guess_places(items: Sequence[ScheduledRequest], rows: Sequence[InputRow]) -> list[int]:
    """Where guesses stand among all tokens of the pass over `rows` of these items, item by item."""
    firsts, num_tokens = [0] * len(rows), 0
    for row in forward_order(rows):
        firsts[row] = num_tokens
        num_tokens += len(rows[row].token_ids)
    return [
        first + index
        for first, item in zip(firsts, items, strict=True)
        for index in range(item.num_tokens - item.num_draft_tokens, item.num_tokens)
    ]
