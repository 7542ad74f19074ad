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

    `tables[i]` is the block table that row i was planned with; a request that has lost its blocks since has another table.
    `chunks` holds, for each row after the decodes (which have one token each), its number of tokens and whether it samples.
    `has_ending`: whether a decode samples its last token.
    """

    requests: list[Request]
    starts: list[int]
    tables: list[Sequence[int]]
    chunks: list[tuple[int, bool]]
    has_ending: bool

    @classmethod
    def of(cls, batch: ScheduledBatch) -> InFlightBatch:
        starts, requests, tables = [item.start for item in batch.items], batch.requests, batch.tables
        if batch.prefills:
            new = [item.request for item in batch.prefills]
            requests, tables = requests + new, tables + [request.block_table for request in new]
        chunks = [(item.num_tokens, item.samples) for item in batch.prefills]
        return cls(requests, starts, tables, chunks, bool(batch.ending))

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
