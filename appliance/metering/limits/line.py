"""Those who wait for room in one allowance, in the order of arrival, and what those before each of them need together.

The sums are kept beside the line, right as far as nothing has changed: to ask for each of its waiters in their order, as who
gives something back does, takes a step for each and not a sum over all before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Generic, TypeVar

from appliance.metering.limits.allowances import Ahead

W = TypeVar("W")


class Line(Generic[W]):
    """Waiters by the number of their arrival, which grows."""

    def __init__(self) -> None:
        self._seqs: list[int] = []
        self._waiters: list[W] = []
        self._needs: list[tuple[int, bool]] = []
        self._before: list[tuple[int, bool]] = [(0, False)]  # of the first ones; [i] sums up the needs of those before i

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[W]:
        return iter(self._waiters)

    def stand(self, seq: int, waiter: W, tokens: int, *, for_window: bool) -> None:
        """Take the place of this arrival, or say anew what is needed there."""
        place, need = bisect_left(self._seqs, seq), (tokens, for_window)
        if place < len(self._seqs) and self._seqs[place] == seq:
            if self._needs[place] == need:
                return
            self._needs[place] = need
        else:
            self._seqs.insert(place, seq)
            self._waiters.insert(place, waiter)
            self._needs.insert(place, need)
        del self._before[place + 1 :]

    def leave(self, seq: int) -> None:
        """Give up the place of an arrival that stands here."""
        place = bisect_left(self._seqs, seq)
        assert self._seqs[place] == seq, "nobody of this arrival stands here"
        del self._seqs[place], self._waiters[place], self._needs[place], self._before[place + 1 :]

    def ahead(self, seq: int | None = None) -> Ahead:
        """Return what those before this arrival need; of all when None."""
        place = len(self._seqs) if seq is None else bisect_left(self._seqs, seq)
        while len(self._before) <= place:
            (tokens, for_window), (more, too) = self._before[-1], self._needs[len(self._before) - 1]
            self._before.append((tokens + more, for_window or too))
        tokens, for_window = self._before[place]
        return Ahead(requests=place, tokens=tokens, for_window=for_window)
