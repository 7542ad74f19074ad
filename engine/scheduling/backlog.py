"""The backlog of one class: accounts by the round in which they are next entitled, in deficit round robin. Integers only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heappop, heappush

from engine.scheduling.accounts import Account


class Backlog:
    """The backlogged accounts of one class, by the round in which each is next entitled: a calendar queue, O(1) per move.

    Deficit round robin (Shreedhar and Varghese, SIGCOMM 1995) with charges as work is done instead of per packet, as in
    deficit longest prefix match (arXiv 2501.14312). An account in the bucket of round r has a position below r · quantum ·
    weight. Its true round may have grown since; it is looked up when the bucket is read.
    """

    def __init__(self, quantum_ps: int, cap_ps: int) -> None:
        self.quantum_ps = quantum_ps
        self.cap_ps = cap_ps
        self.round = 1
        self._buckets: dict[int, dict[Account, None]] = {}
        self._rounds: list[int] = []  # heap of the keys of `_buckets`; some of those buckets are gone
        self._in_heap: set[int] = set()
        self._aside: dict[Account, None] = {}  # backlogged, but without work for the step being planned
        self._lowest_aside: float = math.inf  # round

    def __iter__(self) -> Iterator[Account]:
        for bucket in (*self._buckets.values(), self._aside):
            yield from bucket

    def lead_at(self, account: Account, step: int) -> int:
        return account.position_at(step) - self.round * self.quantum_ps * account.weight

    def is_eligible(self, account: Account, step: int) -> bool:
        return self.lead_at(account, step) < 0

    def join(self, account: Account, step: int) -> None:
        """An account becomes backlogged: its deficit starts within [-cap · weight, quantum · weight]."""
        if account.round is not None:
            return
        lead, weight = self.lead_at(account, step), account.weight
        account.offset_ps += min(max(lead, -self.quantum_ps * weight), self.cap_ps * weight) - lead
        self._insert(account, self._current_round(account, step))

    def leave(self, account: Account) -> None:
        if account.round is None:
            return
        if account in self._aside:
            del self._aside[account]
            account.round = None
            return
        bucket = self._buckets[account.round]
        del bucket[account]
        if not bucket:
            del self._buckets[account.round]
        account.round = None

    def set_lead(self, account: Account, lead_ps: int, step: int) -> None:
        """Set the lead of an account whose weight has changed."""
        account.offset_ps += lead_ps - self.lead_at(account, step)
        if account.round is not None:
            self.leave(account)
            self.join(account, step)

    def next_accounts(self, limit: int, step: int) -> list[Account]:
        """Up to `limit` accounts in the order of their rounds, after the level has risen until one of them is eligible."""
        found: list[Account] = []
        later: list[int] = []
        while self._rounds and len(found) < limit:
            number = self._rounds[0]
            bucket = self._buckets.get(number)
            if bucket is None:
                self._in_heap.remove(heappop(self._rounds))
                continue
            if not found and self.round < number <= self._lowest_aside:
                self.round = number
            self._collect(bucket, number, found, limit, step)
            if number in self._buckets and len(found) < limit:
                later.append(heappop(self._rounds))
        for number in later:
            heappush(self._rounds, number)
        return found

    def _collect(self, bucket: dict[Account, None], number: int, found: list[Account], limit: int, step: int) -> None:
        """Append accounts whose round is still `number` to `found`; move the others to their buckets."""
        moved: list[Account] = []
        for account in bucket:
            if account.position_at(step) >= number * self.quantum_ps * account.weight:
                moved.append(account)
            else:
                found.append(account)
                if len(found) == limit:
                    break
        for account in moved:
            self.leave(account)
            self._insert(account, self._current_round(account, step))

    def set_aside(self, account: Account) -> None:
        """Skip this account until the next step. The level does not rise past accounts that are set aside."""
        number = account.round
        assert number is not None
        self.leave(account)
        account.round = number
        self._aside[account] = None
        self._lowest_aside = min(self._lowest_aside, number)

    def begin_step(self, step: int) -> None:
        """Return the accounts that were set aside to their buckets."""
        aside, self._aside, self._lowest_aside = self._aside, {}, math.inf
        for account in aside:
            self._insert(account, self._current_round(account, step))

    def move_to_back(self, account: Account) -> None:
        """Move an account whose request does not fit now after the others of its round."""
        if account.round is not None:
            bucket = self._buckets[account.round]
            del bucket[account]
            bucket[account] = None

    def _current_round(self, account: Account, step: int) -> int:
        return account.position_at(step) // (self.quantum_ps * account.weight) + 1

    def _insert(self, account: Account, number: int) -> None:
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = {}
            if number not in self._in_heap:
                self._in_heap.add(number)
                heappush(self._rounds, number)
        bucket[account] = None
        account.round = number
