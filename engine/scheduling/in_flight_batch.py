"""A step that was launched and whose results are not known yet: its requests, as they were planned. Knows no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engine.scheduling.request import Request
from engine.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest


@dataclass(frozen=True, slots=True)
class InFlightBatch:
    """Rows of one step in columns, decodes first; the items of its batch have advanced to the next one.

    `decodes` is the batch's own list. `tables[i]` is the block table that row i was planned with; a request that has lost its
    blocks since has another table. `chunks` holds, for each row after the decodes (which have one token each), its number of
    tokens and whether it samples. `ends`: the maximum length of each decode. `min_tokens_left`: the smallest
    distance from the start of a decode to its maximum, one more than the tokens that it may still sample (that of this step
    included), so that a step in which none can reach it does not check for ends; 0 or less without decodes.
    """

    decodes: list[ScheduledRequest]
    requests: list[Request]
    starts: list[int]
    tables: list[Sequence[int]]
    chunks: list[tuple[int, bool]]
    ends: list[int]
    min_tokens_left: int

    @classmethod
    def of(cls, batch: ScheduledBatch, before: InFlightBatch | None) -> InFlightBatch:
        """`before`: the step before, if that was in flight too. It may have the same decodes, each one token earlier."""
        decodes, starts = batch.decodes, [item.start for item in batch.items]
        if before is not None and decodes is before.decodes:
            num_decodes, min_tokens_left = len(decodes), before.min_tokens_left - 1
            requests, tables, ends = before.requests, before.tables, before.ends
            if before.chunks:
                requests, tables = requests[:num_decodes], tables[:num_decodes]
        else:
            requests = [item.request for item in decodes]
            tables = [request.block_table for request in requests]
            ends = [request.max_total_tokens for request in requests]
            min_tokens_left = min([end - start for end, start in zip(ends, starts, strict=False)], default=0)
        if batch.prefills:
            new = [item.request for item in batch.prefills]
            requests, tables = requests + new, tables + [request.block_table for request in new]
        chunks = [(item.num_tokens, item.samples) for item in batch.prefills]
        return cls(decodes, requests, starts, tables, chunks, ends, min_tokens_left)

    @property
    def num_decodes(self) -> int:
        return len(self.requests) - len(self.chunks)

    def is_live(self, row: int) -> bool:
        """Whether the request of a row is still the one that was planned: neither ended nor preempted since, which would have
        given it another table."""
        return self.requests[row].block_table is self.tables[row]

    def item(self, row: int) -> ScheduledRequest:
        """The row as it was planned."""
        num_decodes = self.num_decodes
        num_tokens, samples = self.chunks[row - num_decodes] if row >= num_decodes else (1, True)
        return ScheduledRequest(self.requests[row], self.starts[row], num_tokens, samples)


@contextmanager
def as_planned(in_flight: InFlightBatch, rows: Sequence[int]) -> Iterator[list[ScheduledRequest]]:
    """The given rows, with their requests as they were when the step was planned: no token at or after what it computes next.

    For computing a launched step again. Results of all steps before it must be settled.
    """
    removed = [in_flight.requests[row].remove_unknown_tokens() for row in rows]
    try:
        yield [in_flight.item(row) for row in rows]
    finally:
        for row, num_unknown in zip(rows, removed, strict=True):
            in_flight.requests[row].restore_unknown_tokens(num_unknown)
