"""How many seats of an engine's batch are taken, and how many were on average since an earlier moment. Knows no request."""

from __future__ import annotations

from typing import NamedTuple


class BatchMoment(NamedTuple):
    """A moment: seats taken times the seconds for which they were, summed until then, and its monotonic time in seconds."""

    seat_s: float
    monotonic_s: float


class BatchSize:
    """The seats taken in the batch of one engine, as it reports them after each step. Every answer of a request takes one, also
    while its prompt is computed, and none while it waits or is preempted."""

    def __init__(self) -> None:
        self._seats = 0
        self._seat_s = 0.0
        self._noted_s = 0.0

    def note(self, seats: int, monotonic_s: float) -> None:
        """Note that `seats` are taken from this moment on."""
        self._seat_s += self._seats * (monotonic_s - self._noted_s)
        self._seats, self._noted_s = seats, monotonic_s

    def at(self, monotonic_s: float) -> BatchMoment:
        """Return this moment, for `mean_since`. It must not be earlier than the last report."""
        return BatchMoment(self._seat_s + self._seats * (monotonic_s - self._noted_s), monotonic_s)

    def mean_since(self, then: BatchMoment, monotonic_s: float) -> float | None:
        """Return the mean number of seats taken since `then`; None if no time has passed."""
        elapsed_s = monotonic_s - then.monotonic_s
        return (self.at(monotonic_s).seat_s - then.seat_s) / elapsed_s if elapsed_s > 0 else None
