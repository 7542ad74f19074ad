"""Rotation within a tenant: preempted requests take turns with running ones, so that none stalls for long. Knows no torch.

A tenant that is ahead of others starts nothing, not even a preempted request. Without turns, the same few of its requests would
wait for as long as others want the room. An exchange changes nothing between tenants. A request that comes back recomputes what
it lost before any other prompt, whether its tenant is entitled or not, because a seat that waits does no work.

Blocks of a preempted request stay cached while there is space, so coming back costs little. Where they are gone, exchanges are
rationed: at most one part in `RATION` of the time is spent on recomputing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice, takewhile

from engine.scheduling.accounts import Account, Accounts, account_of
from engine.scheduling.kv_blocks import KvBlocks
from engine.scheduling.policy import SCAN_REQUESTS_MAX
from engine.scheduling.request import Request, RequestStatus

DUE_S = 1.5
"""How long a preempted request waits before another one of its tenant makes room for it."""

CYCLE_STEPS = 96
"""Steps in which all preempted requests of a tenant should have had a turn. The more requests, the shorter each turn."""

TURN_STEPS_MIN = 8
RATION = 20
FREE_TOKENS = 64
"""Up to this many recomputed tokens are not counted: the block that was not full, and a few lost ones."""

SCAN_ACCOUNTS_MAX = 8
"""Accounts examined in a step. The others come first in the next one."""

NS_PER_S = 1_000_000_000


class TenantRotation:
    """Tenants with preempted requests take turns, and within each the requests in the order of preemption. At most one exchange
    per step."""

    def __init__(self, accounts: Accounts, kv: KvBlocks, clock: Callable[[], float]) -> None:
        self._recompute_allowed_s = 0.0  # when the next exchange that costs something is allowed
        self._accounts = accounts
        self._kv = kv
        self._clock = clock
        self._waiting: dict[Account, None] = {}  # those that had preempted requests when last examined, the next first
        self._restarted: dict[Request, None] = {}  # preempted requests that have restarted and recompute what they lost
        self._returning: Request | None = None

    def on_preempted(self, request: Request) -> None:
        request.preempted_s = self._clock()
        self._waiting[account_of(request)] = None

    def on_started(self, request: Request) -> None:
        if request.num_preemptions:
            self._restarted[request] = None

    def first_prefills(self, can_return: Callable[[Request], bool]) -> Iterator[Request]:
        """The requests that get prefill tokens before all others in this step."""
        for request in list(self._restarted):
            if request.status is not RequestStatus.PREFILL:
                del self._restarted[request]
            elif not account_of(request).is_paused:
                yield request
        returning, self._returning = self._returning, None
        if returning is not None and returning.status is RequestStatus.QUEUED and can_return(returning):
            yield returning

    def exchange(self, preempt: Callable[[Request], None]) -> None:
        """Preempt a running request for a request of its tenant that is due, which will start in this step."""
        for account in list(islice(self._waiting, SCAN_ACCOUNTS_MAX)):
            del self._waiting[account]
            first = next(iter(account.waiting.preempted), None)
            if first is None:
                continue
            self._waiting[account] = None
            other = self._longest_turn(account) if self._is_due(first) else None
            if other is not None:
                returning = self._first_that_fits(account, other)
                if returning is not None:
                    preempt(other)
                    self._returning = returning
                return

    def _is_due(self, request: Request) -> bool:
        return self._clock() - request.preempted_s > DUE_S

    def _longest_turn(self, account: Account) -> Request | None:
        """The running request of an account that has had the longest turn, if its turn is over."""
        if account.is_paused:
            return None
        least = self._turn_steps(account)
        for request in islice(account.running, SCAN_REQUESTS_MAX):
            is_turn_over = self._accounts.step - request.moved_step >= least
            if is_turn_over and request.status is RequestStatus.DECODE and request is not account.recovering:
                return request
        return None

    def _first_that_fits(self, account: Account, other: Request) -> Request | None:
        """The first request of an account that is due and can come back in the space that `other` leaves."""
        due = takewhile(self._is_due, islice(account.waiting.preempted, SCAN_REQUESTS_MAX))
        return next((request for request in due if self._fits(request, other)), None)

    def _turn_steps(self, account: Account) -> int:
        turns = CYCLE_STEPS * len(account.running) // len(account.waiting.preempted)
        return min(CYCLE_STEPS, max(TURN_STEPS_MIN, turns))

    def _fits(self, request: Request, other: Request) -> bool:
        """Whether it can come back in the space that `other` leaves, within the ration for recomputing, which it then uses."""
        found = self._kv.find(request)
        if self._kv.num_needed_blocks(request, found) > self._kv.num_spare + len(other.block_table):
            return False
        start = len(found.blocks) * self._kv.block_size
        num_lost = request.num_tokens - start
        if num_lost > FREE_TOKENS:
            now_s = self._clock()
            if now_s < self._recompute_allowed_s:
                return False
            self._recompute_allowed_s = now_s + RATION * self._accounts.costs.prefill_ns(start, num_lost) / NS_PER_S
        return True
