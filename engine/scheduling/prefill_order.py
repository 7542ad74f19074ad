"""The order of prefills within the accounts whose turn it is: which request gets prompt tokens next. Knows no torch.

Running prefills come before new requests. Of the waiting ones, preempted requests come first, then aged ones, then the
longest cached prefix, then the oldest; requests too late for their first-token target come last (`scheduling.urgency`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import islice

from engine.scheduling.accounts import Account
from engine.scheduling.policy import SCAN_REQUESTS_MAX, CanStart, PolicyContext, first_to_start
from engine.scheduling.request import Request
from engine.scheduling.urgency import AGED_EVERY, Urgency

AGEING_ROUNDS = 4
"""Rounds after which the oldest request of a tenant is no longer passed for a longer cached prefix."""

OVERTAKEN_PREFILLS_MAX = 2
"""Running prefills that may be overtaken by requests that can still meet their first-token target: they hold seats."""


def scan_limit(num_accounts: int) -> int:
    """Waiting requests examined of each of these accounts: the fewer, the more accounts there are."""
    return SCAN_REQUESTS_MAX // max(1, num_accounts // 2)


class Rank(IntEnum):
    """Lower goes first; among requests of one rank, those with the longest cached prefix, then the oldest."""

    PREEMPTED = 0
    AGED = 1
    IN_TIME = 2
    LATE = 3


class PrefillOrder:
    """Chooses between prefills. `update_head` is called with an account whose queue was reordered."""

    def __init__(self, context: PolicyContext, update_head: Callable[[Account], None]) -> None:
        self._accounts = context.accounts
        self._urgency = Urgency(context.clock, context.accounts.costs, context.kv.prefix_cache)
        self._match_len = context.kv.prefix_cache.match_len
        self._update_head = update_head

    def select(
        self, accounts: Sequence[Account], current_round: int, can_start: CanStart | None
    ) -> tuple[Request | None, Request | None]:
        """The request that gets prompt tokens next, and the one that no other may pass any more; None where there is none.

        The first is a running prefill that is not in this step yet or, with `can_start`, a waiting request that can start.
        """
        step = self._accounts.step
        prefills = [request for account in accounts for request in account.prefilling if request.scheduled_step != step]
        for request in prefills:
            if not self._urgency.is_late(request) or self._is_due(request):
                return request, None
        if can_start is None or len(prefills) > OVERTAKEN_PREFILLS_MAX:
            return next(iter(prefills), None), None
        start, reserved = first_to_start(self._by_preference(accounts, current_round), can_start)
        if prefills and (start is None or (start.is_late and not self._is_due(start))):
            return prefills[0], reserved
        return start, reserved

    def _by_preference(self, accounts: Sequence[Account], current_round: int) -> list[Request]:
        """Waiting requests that may start, the next first; a bounded number per account."""
        choices: list[tuple[Rank, int, float, int, Request]] = []  # rank, minus cached blocks, since when, index, request
        for account in accounts:
            self._demote_late_requests(account)
            late = account.waiting.first_late
            if late is not None and self._is_due(late):
                choices.append((Rank.AGED, 0, late.arrived_s, len(choices), late))
            has_aged = current_round - account.head_round >= AGEING_ROUNDS
            for index, request in enumerate(islice(account.waiting, scan_limit(len(accounts)))):
                preference = self._preference(request, has_aged=has_aged and index == 0)
                choices.append((*preference, len(choices), request))
        choices.sort()
        return [choice[-1] for choice in choices]

    def _preference(self, request: Request, *, has_aged: bool) -> tuple[Rank, int, float]:
        """Rank, minus cached blocks, and since when."""
        if request.num_preemptions:
            return Rank.PREEMPTED, 0, request.moved_step
        if request.is_late:
            return Rank.LATE, 0, request.arrived_s
        if has_aged:
            return Rank.AGED, 0, request.arrived_s
        return Rank.IN_TIME, -self._match_len(request), request.arrived_s

    def _demote_late_requests(self, account: Account) -> None:
        """Move requests that will miss their first-token target to the end; each is moved once."""
        for _ in range(SCAN_REQUESTS_MAX):
            first = account.waiting.first_regular
            if first is None or not self._urgency.is_late(first):
                break
            account.waiting.move_to_late(first)
        self._update_head(account)

    def _is_due(self, request: Request) -> bool:
        """Whether this late request goes before others in this step."""
        return request.is_late and self._accounts.step % AGED_EVERY == 0 and self._urgency.is_aged(request)
