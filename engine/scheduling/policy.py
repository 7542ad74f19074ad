"""Policies: the order in which waiting requests start and running ones are preempted. The protocol, and the plain policy.

The scheduler knows what fits; a policy only orders. `FairPolicy` is the product's (`scheduling.fair_policy`). First come, first
served exists for comparison.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Protocol

from engine.scheduling.accounts import Account, Accounts
from engine.scheduling.kv_blocks import KvBlocks
from engine.scheduling.request import Request

SCAN_REQUESTS_MAX = 8
"""Requests examined in a step: waiting ones after one that does not fit, preempted ones, and those that these could replace."""

SKIPS_MAX = 32
"""Times that others may pass a request that does not fit. Then all others wait for it, so that it cannot starve."""


class Start(Enum):
    """Whether a waiting request can start. LATER: a running prefill computes the block that it needs next, or this step has
    reused enough tokens."""

    NOW = "now"
    NO_ROOM = "no room"
    LATER = "later"


CanStart = Callable[[Request], Start]


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy may read."""

    accounts: Accounts
    kv: KvBlocks
    max_num_seqs: int
    clock: Callable[[], float]


class Policy(Protocol):
    """Orders requests. A call may examine a bounded number of waiting requests and accounts, never all of them."""

    def on_queued(self, request: Request) -> None:
        """A request has joined its account's queue."""

    def on_dequeued(self, request: Request) -> None:
        """A request has left its account's queue: it starts, or it has ended."""

    def on_started(self, request: Request) -> None:
        """A request got a seat."""

    def set_weight(self, account: Account, weight: int) -> None:
        """The weight of an account changes."""

    def on_backlog_change(self, account: Account) -> None:
        """A prefill of the account is complete, or one of its requests has stopped running."""

    def on_recompute(self, request: Request, num_lost: int) -> None:
        """A preempted request has started again, and recomputes `num_lost` tokens."""

    def begin_step(self) -> None:
        """A step is about to be planned; `accounts.step` is the last one that was charged."""

    def pause_changes(self) -> tuple[list[Account], list[Account]]:
        """Accounts whose running requests must pause from this step on, and accounts whose requests may resume."""

    def next_prefill(self, can_start: CanStart | None) -> Request | None:
        """The request that gets prefill tokens next: a running prefill that is not in this step yet, or a waiting request
        that can start. `can_start` is None when there is no seat."""

    def on_charged(self, account: Account) -> None:
        """An account was charged for something besides its decodes, or has more decodes from now on."""

    def applicants(self) -> list[Request]:
        """Waiting requests for which room may be made by preemption, in order."""

    def victim(self, applicant: Request) -> Request | None:
        """The running request that must make room for the applicant, if any."""

    def on_no_victim(self) -> None:
        """No victim was found for any applicant."""

    def growth_victim(self, running: Iterable[Request]) -> Request:
        """The running request that is preempted when decodes find no block; `running` is by age."""


def first_unscheduled(prefilling: Iterable[Request], step: int) -> Request | None:
    """The first of these prefills that is not in the step yet."""
    for request in prefilling:
        if request.scheduled_step != step:
            return request
    return None


def first_to_start(requests: Iterable[Request], can_start: CanStart) -> tuple[Request | None, Request | None]:
    """The first of `requests` that can start. Or, if it comes before that, the request that does not fit and has been passed
    `SKIPS_MAX` times: no request after it may start. A start adds 1 to `num_skips` of each request before it that did not
    fit."""
    passed: list[Request] = []
    for request in requests:
        decision = can_start(request)
        if decision is Start.NOW:
            for overtaken in passed:
                overtaken.num_skips += 1
            return request, None
        if decision is Start.NO_ROOM:
            if request.num_skips >= SKIPS_MAX:
                return None, request
            passed.append(request)
    return None, None


class PlainPolicy(Policy):
    """A policy without fairness: no account pauses, no request is preempted for another, the youngest gives up its blocks.
    Methods of `Policy` that are not overridden do nothing."""

    def __init__(self, context: PolicyContext) -> None:
        self._accounts = context.accounts

    def set_weight(self, account: Account, weight: int) -> None:
        self._accounts.set_weight(account, weight)

    def pause_changes(self) -> tuple[list[Account], list[Account]]:
        return [], []

    def applicants(self) -> list[Request]:
        return []

    def growth_victim(self, running: Iterable[Request]) -> Request:
        *_, youngest = running
        return youngest


class FcfsPolicy(PlainPolicy):
    """First come, first served, over all tenants."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._queue: OrderedDict[Request, None] = OrderedDict()

    def on_queued(self, request: Request) -> None:
        self._queue[request] = None
        if request.num_preemptions:
            self._queue.move_to_end(request, last=False)

    def on_dequeued(self, request: Request) -> None:
        self._queue.pop(request, None)

    def next_prefill(self, can_start: CanStart | None) -> Request | None:
        chosen = first_unscheduled(self._accounts.prefilling, self._accounts.step)
        if chosen is None and can_start is not None:
            chosen, _ = first_to_start(islice(self._queue, SCAN_REQUESTS_MAX), can_start)
        return chosen
