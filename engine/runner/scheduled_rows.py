"""From scheduled requests to the spans of tokens that a forward pass computes, and to the rows that sample tokens.

`token_span` makes the span of one request. `PlainStepRows` are the rows of a step of the plain runner, all tokens of which are
known on the host. `SlotStepRows` are the rows that sample in a step over slots, where some tokens are known only on the device:
the last one of a decode whose step was launched after another, and the tokens of a draft model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.runner.token_spans import TokenSpan, forward_order
from engine.sampling.logits_rules import SampledRow
from engine.scheduling.scheduled_batch import ScheduledRequest

FIRST_OUTPUT = (0,)
EMPTY = range(0)

DEVICE_TOKEN = (0,)
"""Stands for one token that is filled in on the device: token 0, which every vocabulary has. Distinct from a known token 0 by
identity."""


def token_span(item: ScheduledRequest) -> TokenSpan:
    """The span of `item` in the forward pass, with token 0 for each that the host does not know. Its outputs are the rows that
    sample: that of the last known token and those of draft tokens, none if the step does not sample."""
    request, start, num_tokens = item.request, item.start, item.num_tokens
    if num_tokens == 1 and item.samples:
        token_id = request.token_ids[start]
        return TokenSpan(DEVICE_TOKEN if token_id < 0 else [token_id], start, request.block_table, FIRST_OUTPUT)
    token_ids, outputs = request.token_ids[start : start + num_tokens], EMPTY
    if item.samples:
        token_ids += item.draft_inputs
        outputs = range(item.num_known_tokens - 1, num_tokens)
    return TokenSpan(token_ids, start, request.block_table, outputs)


def device_token_indices(spans: Sequence[TokenSpan]) -> dict[int, int]:
    """The spans that are a `DEVICE_TOKEN`, by the index of their token among all tokens of the pass."""
    return {
        index: index_of_span
        for index, index_of_span in enumerate(forward_order(spans))
        if spans[index_of_span].token_ids is DEVICE_TOKEN
    }


def draft_token_indices(items: Sequence[ScheduledRequest], spans: Sequence[TokenSpan]) -> list[int]:
    """The indices of draft tokens among all tokens of the pass over `spans` of these items, item by item."""
    first_tokens, num_tokens = [0] * len(spans), 0
    for index_of_span in forward_order(spans):
        first_tokens[index_of_span] = num_tokens
        num_tokens += len(spans[index_of_span].token_ids)
    return [
        first + index
        for first, item in zip(first_tokens, items, strict=True)
        for index in range(item.num_known_tokens, item.num_tokens)
    ]


def scored_positions(item: ScheduledRequest) -> range:
    """Positions of this chunk whose next token is a prompt token that was not scored yet, if the request wants scores.

    Each row scores the token after it, and the last prompt token's row chooses the first token of the output instead. A
    request that is computed again after preemption is not scored again. Answers beside the first share its prompt.
    """
    request = item.request
    if request.sampling.prompt_logprobs is None or request.index:
        return EMPTY
    first = max(item.start, request.num_prompt_tokens_computed)
    return range(first, max(first, min(item.start + item.num_tokens, request.num_prompt_tokens - 1)))


@dataclass(slots=True)
class PlainStepRows:
    """Rows of one step of the plain runner. Hidden states are item by item, the sampled ones of each before the scored ones:

    item 0: known tokens … last │ drafts         item 1: a chunk of a prompt with log-probabilities
            ······        0       1   2                  3 (sampled, if the prompt ends here)   4 5 6 7 (scored)

    `spans`: the input of each item. `sampled`: the rows that sample a token. `hidden_rows`: their indices into the hidden
    states. `sampled_ranges[i]`: item i's indices into `sampled`. `scored_ranges[i]`: the indices of its scored rows into the
    hidden states, the first of which predicts token `scored_starts[i]`.
    """

    spans: list[TokenSpan] = field(default_factory=list)
    sampled: list[SampledRow] = field(default_factory=list)
    hidden_rows: list[int] = field(default_factory=list)
    sampled_ranges: list[range] = field(default_factory=list)
    scored_ranges: list[range] = field(default_factory=list)
    scored_starts: list[int] = field(default_factory=list)
    num_outputs: int = 0

    @classmethod
    def of(cls, items: Sequence[ScheduledRequest]) -> PlainStepRows:
        rows = cls()
        for item in items:
            rows._add(item)
        return rows

    def _add(self, item: ScheduledRequest) -> None:
        request, span, positions = item.request, token_span(item), scored_positions(item)
        num_draft_tokens = len(item.draft_token_ids)
        assert num_draft_tokens == item.num_draft_tokens, f"request {request.request_id} has {num_draft_tokens} drafts"
        assert span.token_ids is not DEVICE_TOKEN, f"the host does not know the last token of {request.request_id}"
        num_new_sampled, first, num_sampled = len(span.outputs), self.num_outputs, len(self.sampled)
        if positions:
            span = span._replace(outputs=[*span.outputs, *(position - item.start for position in positions)])
        self.spans.append(span)
        self.sampled += [SampledRow(request, request.num_tokens + depth) for depth in range(num_new_sampled)]
        self.hidden_rows += range(first, first + num_new_sampled)
        self.sampled_ranges.append(range(num_sampled, len(self.sampled)))
        self.num_outputs += len(span.outputs)
        self.scored_ranges.append(range(first + num_new_sampled, self.num_outputs))
        self.scored_starts.append(positions.start + 1)


@dataclass(slots=True)
class SlotStepRows:
    """Rows of a step that sample a token: for each request one after its last token, and one after each of its drafts.

    request a, no drafts       last │ → token                       one row
    request b, drafts x, y     last │ → token   x │ → token   y │ → token      three rows, one slot

    In columns: the item of a row, its slot, its input token (0 for a draft known only on the device; empty without drafts,
    because the tokens are in the slots), and the index of the sampled token in prompt plus output. `depths`: the number of
    drafts of each request that has some, by its first row.
    """

    items: list[ScheduledRequest] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    depths: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, items: Sequence[ScheduledRequest], slots: Sequence[int]) -> SlotStepRows:
        """`items`, all of which sample, in `slots`."""
        assert len(slots) == len(items), "every request of the step has a slot"
        depths = [item.num_draft_tokens for item in items]
        if not any(depths):
            return cls([*items], [*slots], positions=[item.start + item.num_tokens for item in items])
        rows = cls()
        for item, slot, depth in zip(items, slots, depths, strict=True):
            end, num_rows = item.start + item.num_tokens, 1 + depth
            if depth:
                rows.depths[len(rows.items)] = depth
            rows.items += [item] * num_rows
            rows.slots += [slot] * num_rows
            rows.tokens += [item.request.token_ids[end - num_rows], *item.draft_inputs]
            rows.positions += range(end - num_rows + 1, end + 1)
        return rows

    @property
    def draft_rows(self) -> list[int]:
        """The rows of draft tokens, in order."""
        return [first + index for first, depth in self.depths.items() for index in range(1, depth + 1)]

    def input_columns(self, block_size: int) -> list[list[int]]:
        """Columns of a decode step: slots, tokens, positions, slot mapping, context lengths. Each row attends as a decode that
        sees the rows before it, whose keys and values are in the cache by then."""
        slot_mapping = []
        for item, end in zip(self.items, self.positions, strict=True):
            column, offset = divmod(end - 1, block_size)
            slot_mapping.append(item.request.block_table[column] * block_size + offset)
        return [self.slots, self.tokens, [end - 1 for end in self.positions], slot_mapping, self.positions]


def group_rows(slots: Sequence[int], lens: Sequence[int], max_group: int) -> list[list[int]]:
    """Groups of at most `max_group` rows of one slot, which are adjacent and attended as one. lens: of the rows'
    contexts, each one longer than the one before → in columns, as many as there are rows: the slot of a group, the length of
    its last row's context, and its end among the rows. After the last group are some without rows, of length 0."""
    ends, first = [], 0
    for row in range(1, len(slots) + 1):
        if row == len(slots) or slots[row] != slots[first] or row - first == max_group:
            ends.append(row)
            first = row
    num_empty = len(slots) - len(ends)
    last_rows = [end - 1 for end in ends]
    return [
        [slots[row] for row in last_rows] + [slots[-1]] * num_empty,
        [lens[row] for row in last_rows] + [0] * num_empty,
        ends + [len(slots)] * num_empty,
    ]
