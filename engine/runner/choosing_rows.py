"""Rows of a step that choose a token: of each request the one behind its last token, and one behind each of its guesses.

request a, no guesses      last │ → token                       one row
request b, guesses x, y    last │ → token   x │ → token   y │ → token      three rows, one slot
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.scheduling.scheduled_batch import ScheduledRequest


@dataclass(slots=True)
class ChoosingRows:
    """In columns: whose row it is, the slot of that, the input token (0 for a guess that only the device knows), and the index
    of the chosen one in prompt plus output. `depths`: numbers of guesses, by the first row of a request that has some."""

    items: list[ScheduledRequest] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    depths: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, items: Sequence[ScheduledRequest], slots: Sequence[int]) -> ChoosingRows:
        """`items`, all of which sample, in `slots`."""
        rows = cls()
        for item, slot in zip(items, slots, strict=True):
            end, num_rows = item.start + item.num_tokens, 1 + item.num_draft_tokens
            if item.num_draft_tokens:
                rows.depths[len(rows.items)] = item.num_draft_tokens
            rows.items += [item] * num_rows
            rows.slots += [slot] * num_rows
            rows.tokens += [item.request.token_ids[end - num_rows], *item.draft_inputs]
            rows.positions += range(end - num_rows + 1, end + 1)
        return rows

    @property
    def guessing(self) -> list[int]:
        """The rows of guesses, in order."""
        return [first + index for first, depth in self.depths.items() for index in range(1, depth + 1)]

    def inputs(self, block_size: int) -> list[list[int]]:
        """Of decodes with guesses, in columns: slots, tokens, their positions, their places in the cache, lengths of contexts.
        Each row is a decode that sees the rows before it, whose keys and values are in the cache when it attends."""
        places = []
        for item, end in zip(self.items, self.positions, strict=True):
            column, offset = divmod(end - 1, block_size)
            places.append(item.request.block_table[column] * block_size + offset)
        return [self.slots, self.tokens, [end - 1 for end in self.positions], places, self.positions]


def row_groups(slots: Sequence[int], lens: Sequence[int], together: int) -> list[list[int]]:
    """Rows of one slot, which stand together, in groups of at most so many that are attended as one. lens: of the rows'
    contexts, each one longer than the one before → in columns, as many as there are rows: the slot of a group, the length of
    its last row's context, and its end among the rows. Behind the last group are some without rows, of length 0."""
    ends, first = [], 0
    for row in range(1, len(slots) + 1):
        if row == len(slots) or slots[row] != slots[first] or row - first == together:
            ends.append(row)
            first = row
    num_absent = len(slots) - len(ends)
    last_rows = [end - 1 for end in ends]
    return [
        [slots[row] for row in last_rows] + [slots[-1]] * num_absent,
        [lens[row] for row in last_rows] + [0] * num_absent,
        ends + [len(slots)] * num_absent,
    ]
