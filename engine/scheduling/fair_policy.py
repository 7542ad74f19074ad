"""Fair shares between tenants: deficit round robin in predicted device time, with preemption. The product's policy.

Entitlement   An account may start requests while its deficit is positive. When no waiting account is entitled, the level rises
              by a quantum. Among the entitled, running prefills go first, then the longest cached prefix, then age.
Room          Seats and blocks belong to the backlogged accounts in proportion to weight. An entitled account that finds no room
              takes it from the youngest request of the account that holds most or is furthest ahead, never from its equals.
Pausing       An account further ahead than `cap` pauses until the level has caught up. This makes the bound provable.
Classes       A lower class starts only what no higher class can, and every `AGEING_STEPS` one request whatever waits above.

`docs/fairness.md` derives the bound 2(U + Q). The skeleton is deficit longest prefix match (arXiv 2501.14312).
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.protocol import Priority
from engine.scheduling.accounts import Account, account_of, is_paused
from engine.scheduling.backlog import Backlog
from engine.scheduling.lead_tracking import FairSettings, LeadTracker, protected_request
from engine.scheduling.policy import CanStart, PolicyContext, Start, first_unscheduled
from engine.scheduling.preemption import RANK, Preemption
from engine.scheduling.prefill_order import PrefillOrder
from engine.scheduling.request import Request, RequestStatus

SCAN_ACCOUNTS_MAX = 4
"""Accounts examined for a start. The others of the same round come first the next time."""

AGEING_STEPS = 512
"""Steps without a start after which a lower class starts one request before the higher ones."""

QUANTUM_TOKENS = 512
"""The quantum is the cost of a chunk of this many prompt tokens."""

HYSTERESIS_QUANTA, CAP_QUANTA = 4, 8
RETRY_STEPS = 8
"""Steps after which a fruitless search for a victim is repeated although nothing has changed."""

NEVER = (-1, -1, 0)


class FairPolicy:
    """See the module docstring. One backlog per class; an account is in it while it has waiting requests or prefills under
    way."""

    def __init__(self, context: PolicyContext, settings: FairSettings | None = None) -> None:
        quantum_ps = context.accounts.costs.prefill_ps(0, QUANTUM_TOKENS)
        self.settings = settings or FairSettings(
            quantum_ps=quantum_ps, hysteresis_ps=HYSTERESIS_QUANTA * quantum_ps, cap_ps=CAP_QUANTA * quantum_ps
        )
        self.backlogs = {p: Backlog(self.settings.quantum_ps, self.settings.cap_ps) for p in Priority}
        self.recovery_max_ps = 0  # the most that a protected request may have used beyond the cap
        self._order = PrefillOrder(context, self._update_head)
        self._accounts = context.accounts
        self._started_step = dict.fromkeys(Priority, 0)
        self._leads = LeadTracker(context.accounts, self.backlogs, self.settings)
        self._preemption = Preemption(context, self._leads)
        self._num_waiting = dict.fromkeys(Priority, 0)
        self._reserved: Request | None = None  # was passed so often that no request may start before it
        self._room_made_for: Request | None = None  # a request was preempted for it, and it has not started yet
        self._applicant_accounts: list[Account] = []  # whose requests were the last applicants
        self._no_victim_state = NEVER  # versions of accounts and leads, and the step, when no victim was found

    def on_queued(self, request: Request) -> None:
        account = account_of(request)
        backlog = self.backlogs[account.priority]
        self._update_head(account)
        if not self._num_waiting[account.priority]:
            self._started_step[account.priority] = self._accounts.step
        self._num_waiting[account.priority] += 1
        self._no_victim_state = NEVER
        if account.round is None:
            backlog.next_accounts(1, self._accounts.step)
            backlog.join(account, self._accounts.step)
            self._leads.update(account)

    def on_dequeued(self, request: Request) -> None:
        """A request no longer waits: it was started, or it has ended."""
        account = account_of(request)
        self._update_head(account)
        self._num_waiting[account.priority] -= 1
        self.on_backlog_change(account)

    def _update_head(self, account: Account) -> None:
        head = account.waiting.head
        if head is not account.head:
            account.head = head
            account.head_round = self.backlogs[account.priority].round

    def on_started(self, request: Request) -> None:
        priority = account_of(request).priority
        request.is_aged = request.is_aged or self._is_overdue(priority)
        self._started_step[priority] = self._accounts.step

    def on_backlog_change(self, account: Account) -> None:
        """A request of the account has ended, or a prefill is complete: the account may have no backlog any more."""
        if not account.is_backlogged:
            self.backlogs[account.priority].leave(account)
            self._leads.update(account)  # no longer ahead of any account; without decodes nothing else would trigger an update

    def begin_step(self) -> None:
        step = self._accounts.step
        for backlog in self.backlogs.values():
            backlog.begin_step(step)
        self._leads.begin_step()

    def on_charged(self, account: Account) -> None:
        self._leads.update(account)

    def pause_changes(self) -> tuple[list[Account], list[Account]]:
        return self._leads.pause_changes()

    def next_prefill(self, can_start: CanStart | None) -> Request | None:
        overdue = self._overdue_class()
        classes = self.backlogs if overdue is None or can_start is None else (overdue,)
        for priority in classes:
            chosen, self._reserved = self._next_in_class(self.backlogs[priority], can_start)
            if chosen is not None and can_start is not None and chosen.status is RequestStatus.QUEUED:
                return self._start(chosen, can_start)
            if chosen is not None:
                return chosen
            if self._reserved is not None:
                break
        return first_unscheduled((r for r in self._accounts.prefilling if not is_paused(r)), self._accounts.step)

    def _start(self, chosen: Request, can_start: CanStart) -> Request:
        """The request to start when `chosen` can: the one that room was made for goes first. Otherwise the request preempted
        for it, first among its equals, would take the room again, only to be preempted next."""
        applicant = self._room_made_for
        if applicant is None or applicant.status is not RequestStatus.QUEUED or applicant.account is chosen.account:
            self._room_made_for = None
            return chosen
        account = account_of(applicant)
        may_pass = self._overdue_class() is None and RANK[account.priority] <= RANK[account_of(chosen).priority]
        if may_pass and not self.is_ahead(account) and can_start(applicant) is Start.NOW:
            self._room_made_for = None
            return applicant
        return chosen

    def _overdue_class(self) -> Priority | None:
        """The lowest class that has waited too long: no other class starts a request until it has started one."""
        for priority in reversed(Priority):
            if self._num_waiting[priority] and self._is_overdue(priority):
                return priority
        return None

    def _is_overdue(self, priority: Priority) -> bool:
        waited = self._accounts.step - self._started_step[priority]
        return waited > AGEING_STEPS and self._accounts.has_requests_above(priority)

    def _next_in_class(self, backlog: Backlog, can_start: CanStart | None) -> tuple[Request | None, Request | None]:
        """As `PrefillOrder.select`, among the first accounts of a class: entitled ones below their share, other entitled ones,
        the rest."""
        step = self._accounts.step
        accounts = self._accounts_with_work(backlog, step)
        if not accounts:
            return None, None
        entitled = [account for account in accounts if backlog.is_eligible(account, step)]
        below = [account for account in entitled if self._preemption.is_below_share(account)]
        above = [account for account in entitled if account not in below]
        others = [account for account in accounts if account not in entitled and not self.is_ahead(account)]
        reserved: Request | None = None
        for group in (below, above, others):
            chosen, passed = self._order.select(group, backlog.round, None if reserved else can_start)
            reserved = reserved or passed
            if chosen is not None:
                return chosen, reserved
        if can_start is not None:
            for account in accounts:
                backlog.move_to_back(account)
        return None, reserved

    def _accounts_with_work(self, backlog: Backlog, step: int) -> list[Account]:
        """The first accounts that can do something in this step; those without work are set aside until the next step."""
        while True:
            accounts = backlog.next_accounts(SCAN_ACCOUNTS_MAX, step)
            idle = [account for account in accounts if not _has_work(account, step)]
            if not idle:
                return accounts
            for account in idle:
                backlog.set_aside(account)

    def applicants(self) -> list[Request]:
        """The request that may not be passed any more; else those of the entitled accounts in the highest waiting class."""
        self._applicant_accounts = []
        if self._would_find_no_victim():
            return []
        step, overdue, reserved = self._accounts.step, self._overdue_class(), self._reserved
        if reserved is not None and reserved.status is RequestStatus.QUEUED and not self.is_ahead(account_of(reserved)):
            return [reserved]
        for priority, backlog in self.backlogs.items():
            if self._num_waiting[priority] and overdue in (None, priority):
                accounts = backlog.next_accounts(SCAN_ACCOUNTS_MAX, step)
                heads = [account.waiting.head for account in accounts if backlog.is_eligible(account, step)]
                found = [head for head in heads if head is not None]
                if found:
                    self._applicant_accounts = accounts
                    return found
        return []

    def _would_find_no_victim(self) -> bool:
        """Whether no victim was found a moment ago, and no request has arrived, started or stopped since."""
        version, leads_version, step = self._no_victim_state
        is_unchanged = version == self._accounts.version and leads_version == self._leads.version
        return is_unchanged and not self._leads.paused and self._accounts.step - step < RETRY_STEPS

    def is_ahead(self, account: Account) -> bool:
        """Whether an account starts nothing now because it is ahead of others by more than the hysteresis."""
        return self._leads.lead_of(account) >= self.settings.hysteresis_ps

    def set_weight(self, account: Account, weight: int) -> None:
        """Called when a tenant's weight changes: it stays as far ahead per unit of weight as before."""
        backlog, step = self.backlogs[account.priority], self._accounts.step
        lead = backlog.lead_at(account, step)
        scaled = lead * weight // account.weight
        self._accounts.set_weight(account, weight)
        backlog.set_lead(account, scaled, step)
        self._leads.update(account)  # with another weight, decodes carry it across a threshold sooner

    def on_recompute(self, request: Request, num_lost: int) -> None:
        """One request of a tenant at a time is protected until it has gained as many tokens as it lost. So waste is bounded,
        and every tenant makes progress, however little room there is."""
        account, costs = account_of(request), self._accounts.costs
        start = request.num_computed_tokens
        self._preemption.wasted_ps += costs.prefill_ps(start, num_lost)
        if protected_request(account) in (None, request):
            account.recovering = request
            request.protected_len = start + 2 * num_lost
            gain_ps = costs.decode_ps(num_lost, num_lost * request.protected_len)
            self.recovery_max_ps = max(self.recovery_max_ps, costs.prefill_ps(start, 2 * num_lost) + gain_ps)

    def on_no_victim(self) -> None:
        """Move the applicants' accounts after the others of their round, one of which may have nothing yet."""
        for account in self._applicant_accounts:
            self.backlogs[account.priority].move_to_back(account)
        self._no_victim_state = (self._accounts.version, self._leads.version, self._accounts.step)

    def victim(self, applicant: Request) -> Request | None:
        victim = self._preemption.victim(applicant)
        if victim is not None:
            self._room_made_for = applicant
        return victim

    def growth_victim(self, running: Iterable[Request]) -> Request:
        return self._preemption.growth_victim(running)


def _has_work(account: Account, step: int) -> bool:
    """Whether an account has a request to start, or a prefill that is not in the step yet."""
    if account.is_paused:
        return False
    return bool(account.waiting) or any(request.scheduled_step != step for request in account.prefilling)
