"""A step that was launched and whose results are not known yet: who is in it, as it was planned. Knows no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engine.scheduling.request import Request
from engine.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest


@dataclass(frozen=True, slots=True)
class InFlightBatch:
    """Rows of one step in columns, decodes first; the items of its batch have gone on to the next one.

    `decodes` is the batch's own list. `tables[i]` is the block table that row i was planned with: one that lost its blocks
    since has another. `chunks` are the tokens of the rows behind the decodes, which have one each, and whether they sample.
    `first_end`: how far the decode that is nearest to its greatest length is from it, so that a step in which none can reach
    it does not look for ends.
    """

    decodes: list[ScheduledRequest]
    requests: list[Request]
    starts: list[int]
    tables: list[Sequence[int]]
    chunks: list[tuple[int, bool]]
    first_end: int

    @classmethod
    def of(cls, batch: ScheduledBatch, before: InFlightBatch | None) -> InFlightBatch:
        """`before`: the step before, if that was in flight too: it may have the same rows, each one token earlier."""
        items = batch.items
        starts = [item.start for item in items]
        if before is not None and items is before.decodes and not before.chunks:
            return cls(items, before.requests, starts, before.tables, [], before.first_end - 1)
        requests = [item.request for item in items]
        num_decodes = len(batch.decodes)
        ends = [request.max_total_tokens - start for request, start in zip(requests[:num_decodes], starts, strict=False)]
        return cls(
            decodes=batch.decodes,
            requests=requests,
            starts=starts,
            tables=[request.block_table for request in requests],
            chunks=[(item.num_tokens, item.samples) for item in batch.prefills],
            first_end=min(ends, default=0),
        )

    @property
    def num_decodes(self) -> int:
        return len(self.requests) - len(self.chunks)

    def holds(self, row: int) -> bool:
        """Whether the request of a row is still the one that was planned: neither ended nor preempted since."""
        request = self.requests[row]
        return not request.is_finished and request.block_table is self.tables[row]

    def item(self, row: int) -> ScheduledRequest:
        """The row as it was planned."""
        num_decodes = self.num_decodes
        num_tokens, samples = self.chunks[row - num_decodes] if row >= num_decodes else (1, True)
        return ScheduledRequest(self.requests[row], self.starts[row], num_tokens, samples)


@contextmanager
def as_planned(in_flight: InFlightBatch, rows: Sequence[int]) -> Iterator[list[ScheduledRequest]]:
    """The given rows with their requests as they were when the step was planned: no token at or behind what it computes next.

    For computing a step again that was launched. Results of all steps before it must be settled.
    """
    taken = [in_flight.requests[row].take_unknown() for row in rows]
    try:
        yield [in_flight.item(row) for row in rows]
    finally:
        for row, num_unknown in zip(rows, taken, strict=True):
            in_flight.requests[row].give_unknown(num_unknown)
