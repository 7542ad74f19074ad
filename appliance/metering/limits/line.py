"""The waiters for room in one allowance, in order of arrival, and how much all those ahead of each one need.

Running sums are kept, valid up to the first place that has changed: asking for every waiter in order, as happens when something
is given back, takes one step each instead of a sum over everyone ahead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Generic, TypeVar

from appliance.metering.limits.allowances import Ahead

W = TypeVar("W")


class Line(Generic[W]):
    """Waiters, sorted by arrival number."""

    def __init__(self) -> None:
        self._seqs: list[int] = []
        self._waiters: list[W] = []
        self._needs: list[tuple[int, bool]] = []
        self._before: list[tuple[int, bool]] = [(0, False)]  # as far as valid; [i] is what those before place i need

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[W]:
        return iter(self._waiters)

    def join(self, seq: int, waiter: W, tokens: int, *, for_window: bool) -> None:
        """Add a waiter at the place of its arrival number, or update what it needs."""
        place, need = bisect_left(self._seqs, seq), (tokens, for_window)
        if place < len(self._seqs) and self._seqs[place] == seq:
            self._needs[place] = need
        else:
            self._seqs.insert(place, seq)
            self._waiters.insert(place, waiter)
            self._needs.insert(place, need)
        del self._before[place + 1 :]

    def leave(self, seq: int) -> None:
        """Remove the waiter with this arrival number, which must be here."""
        place = bisect_left(self._seqs, seq)
        assert self._seqs[place] == seq, "no waiter has this arrival number"
        del self._seqs[place], self._waiters[place], self._needs[place], self._before[place + 1 :]

    def ahead(self, seq: int | None = None) -> Ahead:
        """Return what the waiters before this arrival number need; all of them when None."""
        place = len(self._seqs) if seq is None else bisect_left(self._seqs, seq)
        while len(self._before) <= place:
            (tokens, for_window), (more, too) = self._before[-1], self._needs[len(self._before) - 1]
            self._before.append((tokens + more, for_window or too))
        tokens, for_window = self._before[place]
        return Ahead(requests=place, tokens=tokens, for_window=for_window)
