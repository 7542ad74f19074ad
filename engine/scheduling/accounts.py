"""Accounts: each tenant's service, running and waiting requests, and the round of its class in which it is next entitled.

A tenant has one account per priority class. Service is predicted device time in integer picoseconds. Decodes are charged in
closed form: between two changes, the service of an account is a function of the step number. `docs/fairness.md` defines the
terms and proves the bound.

    position   service of the account, moved when it joins the backlog: up, so that idleness earns at most one quantum, and
               down, so that service which no other account wanted at the time does not count against it for ever
    level      round · quantum, in picoseconds per unit of weight; equal for all accounts of a class
    deficit    level · weight - position; the account is entitled (eligible) while it is above zero
    lead       position - level · weight, the same with the other sign
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.protocol import Priority, TenantProgress
from engine.scheduling.costs import TokenCosts
from engine.scheduling.request import Request
from engine.scheduling.waiting import WaitingQueue

PS_PER_S = 10**12
IDLE_ACCOUNTS_MAX = 4096
OUTPUT_LENGTHS_KEPT = 64
OUTPUT_LEN_UNKNOWN = 256
"""Predicted output tokens of a tenant that has not finished a request yet."""

OUTPUT_QUANTILE = 0.75


@dataclass(slots=True, eq=False)
class Account:
    """One tenant in one class. `num_decoding` requests with `sum_context` tokens compute a token each in every step."""

    tenant_id: str
    priority: Priority
    weight: int
    costs: TokenCosts
    service_ps: int = 0
    offset_ps: int = 0
    charged_step: int = 0
    num_decoding: int = 0
    sum_context: int = 0
    num_blocks: int = 0
    running: dict[Request, None] = field(default_factory=dict)  # by age
    prefilling: dict[Request, None] = field(default_factory=dict)  # by age; part of `running`
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    round: int | None = None  # in the backlog; None when not backlogged
    head: Request | None = None  # of `waiting`, as of the last change
    head_round: int = 0  # the round in which `head` was set
    is_paused: bool = False
    recovering: Request | None = None  # restarted after a preemption and protected: `FairPolicy.on_recompute`
    watch_step: int = -1  # the step in which to check next whether it is too far ahead
    output_lens: deque[int] = field(default_factory=lambda: deque(maxlen=OUTPUT_LENGTHS_KEPT))
    _predicted_output_len: int | None = None

    @property
    def is_backlogged(self) -> bool:
        """Whether it has prompt tokens to compute."""
        return bool(self.waiting or self.prefilling)

    @property
    def is_active(self) -> bool:
        return bool(self.waiting or self.running)

    def service_at(self, step: int) -> int:
        """Service when step number `step` has been charged: Σ over the steps of n·a + (context + n·k)·b, exactly."""
        steps = step - self.charged_step
        if not steps or not self.num_decoding:
            return self.service_ps
        decoding = self.num_decoding
        contexts = steps * self.sum_context + decoding * (steps * (steps - 1) // 2)
        return self.service_ps + self.costs.decode_ps(steps * decoding, contexts)

    def position_at(self, step: int) -> int:
        return self.service_at(step) + self.offset_ps

    def charge_decodes(self, step: int) -> None:
        """Bring `service_ps` up to `step`; required before the set of decoding requests changes."""
        self.service_ps = self.service_at(step)
        self.sum_context += self.num_decoding * (step - self.charged_step)
        self.charged_step = step

    def add_decode(self, context_len: int, step: int) -> None:
        """One more request decodes from the step after `step` on, starting with `context_len` computed tokens."""
        self.charge_decodes(step)
        self.num_decoding += 1
        self.sum_context += context_len

    def remove_decode(self, context_len: int, step: int) -> None:
        self.charge_decodes(step)
        self.num_decoding -= 1
        self.sum_context -= context_len
        assert self.num_decoding > 0 or self.sum_context == 0, (
            f"tenant {self.tenant_id} is charged for contexts that it does not have"
        )

    def charge(self, cost_ps: int) -> None:
        self.service_ps += cost_ps

    def context_at(self, step: int) -> int:
        """Σ computed tokens of its decoding requests when step number `step` has been charged."""
        return self.sum_context + self.num_decoding * (step - self.charged_step)

    def steps_within(self, slack_ps: int, step: int) -> int:
        """A number of further steps, at least one, after which decoding alone has certainly used at most `slack_ps`."""
        step_ps = self.costs.decode_ps(self.num_decoding, self.context_at(step))
        max_steps = slack_ps // step_ps
        return max(1, slack_ps // (step_ps + self.costs.decode_context_ps * self.num_decoding * max_steps // 2))

    def record_output(self, num_tokens: int) -> None:
        """Remember the length of a finished answer."""
        self.output_lens.append(num_tokens)
        self._predicted_output_len = None

    def predicted_output_len(self) -> int:
        """An upper quantile of recent output lengths."""
        if self._predicted_output_len is None:
            lens = sorted(self.output_lens)
            self._predicted_output_len = lens[int(len(lens) * OUTPUT_QUANTILE)] if lens else OUTPUT_LEN_UNKNOWN
        return self._predicted_output_len


def account_of(request: Request) -> Account:
    """The account that is charged for a request of the scheduler."""
    account = request.account
    assert isinstance(account, Account), f"request {request.request_id} has no account"
    return account


def is_paused(request: Request) -> bool:
    """Whether a running request is left out of the steps because its account pauses."""
    account = account_of(request)
    return account.is_paused and account.recovering is not request


class SeatCounts:
    """Accounts by number of running requests and by weight, so that the one with most seats is found in O(1) per change."""

    def __init__(self) -> None:
        self._by_weight: dict[int, list[dict[Account, None]]] = {}

    def move(self, account: Account, before: int, after: int) -> None:
        """Move `account` from `before` to `after` running requests."""
        counts = self._by_weight.setdefault(account.weight, [])
        if before:
            del counts[before - 1][account]
        while len(counts) < after:
            counts.append({})
        if after:
            counts[after - 1][account] = None
        while counts and not counts[-1]:
            counts.pop()

    def largest_holder(self) -> Account | None:
        """The account with most seats per unit of weight."""
        best: Account | None = None
        for weight, counts in self._by_weight.items():
            if counts and (best is None or len(counts) * best.weight > len(best.running) * weight):
                best = next(reversed(counts[-1]))
        return best


@dataclass(slots=True)
class ClassTotals:
    """Sums over the active accounts of one class."""

    weight: int = 0
    seats: SeatCounts = field(default_factory=SeatCounts)


class Accounts:
    """All accounts, by tenant and class. The latest accounts without requests are kept, as their debts still count."""

    def __init__(self, costs: TokenCosts) -> None:
        self.costs = costs
        self.step = 0  # the last step whose decodes were charged
        self.aggregate = Account("", Priority.STANDARD, 1, costs)  # sums over all accounts
        self.totals = {priority: ClassTotals() for priority in Priority}
        self.running_requests: dict[Request, None] = {}  # by age
        self.seated: dict[Account, None] = {}  # those with running requests
        self.prefilling: dict[Request, None] = {}  # of all accounts, by age
        self.version = 0  # grows whenever a request starts or stops running
        self._accounts: dict[tuple[str, Priority], Account] = {}
        self._idle: OrderedDict[Account, None] = OrderedDict()  # without requests, longest first

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def find(self, tenant_id: str, priority: Priority, weight: int) -> Account:
        """The account of a tenant in a class; a new one has the given weight."""
        account = self._accounts.get((tenant_id, priority))
        if account is None:
            account = Account(tenant_id, priority, weight, self.costs, charged_step=self.step)
            self._accounts[tenant_id, priority] = account
        return account

    def add_waiting(self, request: Request, *, first: bool) -> None:
        account = account_of(request)
        self._activate(account)
        account.waiting.add(request, first=first)

    def start_running(self, request: Request) -> None:
        """Give a waiting request a seat."""
        account = account_of(request)
        account.waiting.remove(request)
        account.running[request] = account.prefilling[request] = self.prefilling[request] = None
        self.running_requests[request] = None
        self.seated[account] = None
        self._change_seats(account, +1)

    def stop_running(self, request: Request) -> None:
        """Free the seat of a running request; if it decoded, call `stop_decoding` first."""
        account = account_of(request)
        if account.recovering is request:
            account.recovering = None
        account.prefilling.pop(request, None)
        self.prefilling.pop(request, None)
        del account.running[request], self.running_requests[request]
        if not account.running:
            del self.seated[account]
        self._change_seats(account, -1)
        self._deactivate(account)

    def remove_waiting(self, request: Request) -> None:
        """Remove a waiting request that has ended."""
        account = account_of(request)
        account.waiting.remove(request)
        self._deactivate(account)

    def finish_prefill(self, request: Request) -> None:
        del account_of(request).prefilling[request], self.prefilling[request]

    def charge(self, account: Account, cost_ps: int) -> None:
        account.charge(cost_ps)
        self.aggregate.charge(cost_ps)

    def has_requests_above(self, priority: Priority) -> bool:
        """Whether a higher class has requests, waiting or running."""
        for other, totals in self.totals.items():
            if other is priority:
                return False
            if totals.weight:
                return True
        return False

    def start_decoding(self, request: Request) -> None:
        for account in (account_of(request), self.aggregate):
            account.add_decode(request.num_computed_tokens, self.step)

    def stop_decoding(self, request: Request) -> None:
        for account in (account_of(request), self.aggregate):
            account.remove_decode(request.num_computed_tokens, self.step)

    def add_context(self, request: Request, num_tokens: int) -> None:
        """Add tokens of a decoding request beyond the one that each step books."""
        for account in (account_of(request), self.aggregate):
            account.charge_decodes(self.step)
            account.sum_context += num_tokens

    def progress(self) -> list[TenantProgress]:
        """The progress of every active tenant, over all classes. Iterates over all accounts."""
        by_tenant: dict[str, list[Account]] = {}
        for account in self._accounts.values():
            if account.is_active:
                by_tenant.setdefault(account.tenant_id, []).append(account)
        return [
            TenantProgress(
                tenant_id=tenant_id,
                num_running=sum(len(account.running) for account in accounts),
                num_waiting=sum(len(account.waiting) for account in accounts),
                kv_blocks=sum(account.num_blocks for account in accounts),
                service_s=sum(account.service_at(self.step) for account in accounts) / PS_PER_S,
            )
            for tenant_id, accounts in by_tenant.items()
        ]

    def set_weight(self, account: Account, weight: int) -> None:
        """Set `account.weight` and update the sums of its class."""
        totals, num_running = self.totals[account.priority], len(account.running)
        totals.seats.move(account, num_running, 0)
        totals.weight += (weight - account.weight) * account.is_active
        account.weight = weight
        totals.seats.move(account, 0, num_running)

    def _change_seats(self, account: Account, change: int) -> None:
        seats, num_running = self.totals[account.priority].seats, len(account.running)
        seats.move(account, num_running - change, num_running)
        self.version += 1

    def _activate(self, account: Account) -> None:
        if not account.is_active:
            self._idle.pop(account, None)
            self.totals[account.priority].weight += account.weight

    def _deactivate(self, account: Account) -> None:
        if account.is_active:
            return
        self.totals[account.priority].weight -= account.weight
        self._idle[account] = None
        if len(self._idle) > IDLE_ACCOUNTS_MAX:
            oldest, _ = self._idle.popitem(last=False)
            del self._accounts[oldest.tenant_id, oldest.priority]
