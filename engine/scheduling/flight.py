"""A step that was launched and whose results are not known yet: who is in it, as it was planned. Knows no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engine.scheduling.request import UNKNOWN_TOKEN as UNKNOWN_TOKEN
from engine.scheduling.request import Request
from engine.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest


@dataclass(frozen=True, slots=True)
class Flight:
    """Rows of one step in columns, decodes first; the items of its batch have gone on to the next one.

    `tables[i]` is the block table that row i was planned with: a request that lost its blocks since has another one.
    """

    requests: list[Request]
    starts: list[int]
    num_tokens: list[int]
    samples: list[bool]
    num_decodes: int
    tables: list[list[int]]

    @classmethod
    def of(cls, batch: ScheduledBatch) -> Flight:
        items = batch.items
        return cls(
            requests=[item.request for item in items],
            starts=[item.start for item in items],
            num_tokens=[item.num_tokens for item in items],
            samples=[item.samples for item in items],
            num_decodes=len(batch.decodes),
            tables=[item.request.block_table for item in items],
        )

    def holds(self, row: int) -> bool:
        """Whether the request of a row is still the one that was planned: neither ended nor preempted since."""
        request = self.requests[row]
        return not request.is_finished and request.block_table is self.tables[row]

    def item(self, row: int) -> ScheduledRequest:
        """The row as it was planned."""
        return ScheduledRequest(self.requests[row], self.starts[row], self.num_tokens[row], self.samples[row])


@contextmanager
def as_planned(flight: Flight, rows: Sequence[int]) -> Iterator[list[ScheduledRequest]]:
    """The given rows with their requests as they were when the step was planned: no token at or behind what it computes next.

    For computing a step again that was launched. Results of all steps before it must be settled.
    """
    taken = [flight.requests[row].take_unknown() for row in rows]
    try:
        yield [flight.item(row) for row in rows]
    finally:
        for row, num_unknown in zip(rows, taken, strict=True):
            flight.requests[row].give_unknown(num_unknown)
