"""The FIFO queue of one allowance's waiters, and what the waiters ahead of each one need in total.

Prefix sums are kept, valid up to the first position that has changed: asking for every waiter in order, as happens when
something is released, takes one step each instead of a sum over everyone ahead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Generic, TypeVar

from appliance.metering.limits.allowances import Ahead

W = TypeVar("W")


class WaiterQueue(Generic[W]):
    """Waiters, sorted by arrival number."""

    def __init__(self) -> None:
        self._seqs: list[int] = []
        self._waiters: list[W] = []
        self._needs: list[tuple[int, bool]] = []
        self._prefixes: list[tuple[int, bool]] = [(0, False)]  # [i]: needs of the waiters before position i, as far as valid

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[W]:
        return iter(self._waiters)

    def join(self, seq: int, waiter: W, tokens: int, *, wants_window: bool) -> None:
        """Insert a waiter by its arrival number, or update what it needs."""
        index, need = bisect_left(self._seqs, seq), (tokens, wants_window)
        if index < len(self._seqs) and self._seqs[index] == seq:
            self._needs[index] = need
        else:
            self._seqs.insert(index, seq)
            self._waiters.insert(index, waiter)
            self._needs.insert(index, need)
        del self._prefixes[index + 1 :]

    def leave(self, seq: int) -> None:
        """Remove the waiter with this arrival number, which must be in the queue."""
        index = bisect_left(self._seqs, seq)
        assert self._seqs[index] == seq, "no waiter has this arrival number"
        del self._seqs[index], self._waiters[index], self._needs[index], self._prefixes[index + 1 :]

    def ahead(self, seq: int | None = None) -> Ahead:
        """Return what the waiters before this arrival number need; all of them when None."""
        index = len(self._seqs) if seq is None else bisect_left(self._seqs, seq)
        while len(self._prefixes) <= index:
            (tokens, wants_window), need = self._prefixes[-1], self._needs[len(self._prefixes) - 1]
            self._prefixes.append((tokens + need[0], wants_window or need[1]))
        tokens, wants_window = self._prefixes[index]
        return Ahead(requests=index, tokens=tokens, wants_window=wants_window)
