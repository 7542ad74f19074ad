"""Fair shares between tenants: deficit round robin in predicted device time, with preemption. The product's policy.

Entitlement   An account may start requests while its deficit is positive. When nobody who waits is entitled, the level rises
              by a quantum. Among the entitled, prefills under way go first, then the longest cached prefix, then age.
Room          Seats and blocks belong to the backlogged accounts in proportion to weight. Somebody entitled who finds no room
              takes it from the youngest request of who holds most, or of who is furthest ahead, never from its equals.
Pace          An account further ahead than `cap` pauses until the level has caught up. This makes the bound provable.
Classes       A lower class starts only what no higher class can, and every `AGEING_STEPS` one request whatever waits above.

`docs/fairness.md` derives the bound 2(U + Q). The skeleton is deficit longest prefix match (arXiv 2501.14312).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.fairness import Account, Backlog
from engine.policy import CanStart, PolicyContext, under_way
from engine.protocol import Priority
from engine.request import Request, RequestStatus
from engine.turn_order import TurnOrder

LOOK_ACCOUNTS = 8
"""Accounts looked at for a start; the others of the round come first the next time."""

AGEING_STEPS = 512
"""Steps without a start after which a lower class starts one request before the higher ones."""

QUANTUM_TOKENS = 512
"""The quantum is what a chunk of so many prompt tokens costs."""

HYSTERESIS_QUANTA, CAP_QUANTA = 4, 8
SEAT_PERCENT = 87
"""A seat moves to an account that has one already only if its share stays so far below the other's: no churn at the border."""

BLOCK_SCALE = 1 << 20
RANK = {priority: rank for rank, priority in enumerate(Priority)}

DISPLACES = (Priority.INTERACTIVE, Priority.BATCH)
"""Whose waiting requests may preempt whose running ones, whatever either was served."""

RETRY_STEPS = 8
TURN_STEPS = 128
"""Steps that a preempted request waits at least, and that another runs, before they take turns in a seat of their tenant."""

WATCH_STEPS_MAX = 256
"""An account is looked at at least so often; the calendar of looks stays short."""

WASTE_PERCENT, WASTE_FREE_QUANTA = 2, 64
"""Preemption for service stops when more than this share of all service was computed twice; so many quanta are free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FairSettings:
    """In picoseconds per unit of weight. Q: what idling earns at most. An account ahead of the level by more than
    `hysteresis_ps` may lose a seat to somebody entitled; ahead by more than `cap_ps` it pauses."""

    quantum_ps: int
    hysteresis_ps: int
    cap_ps: int


class FairPolicy:
    """See the module. One backlog per class; an account stands in it while it has waiting requests or prefills under way."""

    def __init__(self, context: PolicyContext, settings: FairSettings | None = None) -> None:
        quantum_ps = context.accounts.costs.prefill_ps(0, QUANTUM_TOKENS)
        self.settings = settings or FairSettings(
            quantum_ps=quantum_ps, hysteresis_ps=HYSTERESIS_QUANTA * quantum_ps, cap_ps=CAP_QUANTA * quantum_ps
        )
        self.backlogs = {p: Backlog(self.settings.quantum_ps, self.settings.cap_ps) for p in Priority}
        self.wasted_ps = 0
        self.recovery_max_ps = 0  # the most that a secured request may have used beyond the cap
        self._context = context
        self._order = TurnOrder(context, self._note_head)
        self._accounts = context.accounts
        self._started_step = dict.fromkeys(Priority, 0)
        self._watched: dict[int, list[Account]] = {}
        self._ahead: dict[Account, None] = {}
        self._held: dict[Account, None] = {}
        self._num_waiting = dict.fromkeys(Priority, 0)
        self._reserved: Request | None = None  # was passed so often that nobody starts before it
        self._fruitless = (-1, 0)  # version of the accounts and step when no victim was found

    def waits(self, request: Request) -> None:
        account = _account(request)
        backlog = self.backlogs[account.priority]
        self._note_head(account)
        if not self._num_waiting[account.priority]:
            self._started_step[account.priority] = self._accounts.step
        self._num_waiting[account.priority] += 1
        self._fruitless = (-1, 0)
        if account.round is None:
            backlog.first(1, self._accounts.step)
            backlog.join(account, self._accounts.step)
            self._look_at(account)

    def left(self, request: Request) -> None:
        """It started, or it ended while it waited."""
        account = _account(request)
        self._note_head(account)
        self._num_waiting[account.priority] -= 1
        self.settled(account)

    def _note_head(self, account: Account) -> None:
        head = account.waiting.head
        if head is not account.head:
            account.head = head
            account.head_round = self.backlogs[account.priority].round

    def started(self, request: Request) -> None:
        priority = _account(request).priority
        request.is_aged = request.is_aged or priority is self._overdue_class()
        self._started_step[priority] = self._accounts.step

    def settled(self, account: Account) -> None:
        """Something of the account has ended, or a prefill is complete: it may not be backlogged any more."""
        if not account.is_backlogged:
            self.backlogs[account.priority].leave(account)

    def begin_step(self) -> None:
        """Raise the levels of the round; find who has come too far ahead."""
        step = self._accounts.step
        watched = self._watched.pop(step, None)
        if watched is None and not self._ahead:
            return
        for backlog in self.backlogs.values():
            backlog.first(1, step)
        for account in watched or ():
            if account.watch_step == step:
                self._look_at(account)
        for account in list(self._ahead):
            self._look_at(account)

    def _look_at(self, account: Account) -> None:
        """Book whether a backlogged account is ahead by more than the hysteresis, or when it could be at the earliest."""
        step, backlog = self._accounts.step, self.backlogs[account.priority]
        lead = backlog.lead_at(account, step)
        slack = self.settings.hysteresis_ps * account.weight - lead
        if account.round is None or not account.running:
            self._ahead.pop(account, None)
        elif slack < 0:
            self._ahead[account] = None
        else:
            self._ahead.pop(account, None)
            if account.num_decoding and not step < account.watch_step <= step + account.steps_within(slack, step):
                account.watch_step = step + min(account.steps_within(slack, step), WATCH_STEPS_MAX)
                self._watched.setdefault(account.watch_step, []).append(account)

    def charged(self, account: Account) -> None:
        self._look_at(account)

    def holds(self) -> tuple[list[Account], list[Account]]:
        if not self._ahead and not self._held:
            return [], []
        step = self._accounts.step
        too_far = {
            account: None
            for account in self._ahead
            if self.backlogs[account.priority].lead_at(account, step) > self.settings.cap_ps * account.weight
        }
        recovers = {account for account in too_far if account.recovering is not None}
        for account in recovers:
            _recovering(account)
        hold = [account for account in too_far if account not in self._held or account in recovers]
        release = [account for account in self._held if account not in too_far]
        self._held = too_far
        return hold, release

    def next_turn(self, can_start: CanStart | None) -> Request | None:
        self._reserved = None
        overdue = self._overdue_class()
        classes = self.backlogs if overdue is None or can_start is None else (overdue,)
        for priority in classes:
            turn = self._turn_of(self.backlogs[priority], can_start)
            if turn is not None:
                return turn
            if self._has_reserved():
                break
        return under_way((r for r in self._accounts.prefilling if not _is_paused(r)), self._accounts.step)

    def _has_reserved(self) -> bool:
        return self._reserved is not None

    def _overdue_class(self) -> Priority | None:
        """The lowest class that waited for too long: nobody else starts anything until it has."""
        for priority in reversed(Priority):
            waited = self._accounts.step - self._started_step[priority]
            if waited > AGEING_STEPS and self._num_waiting[priority] and self._accounts.totals_above(priority):
                return priority
        return None

    def _turn_of(self, backlog: Backlog, can_start: CanStart | None) -> Request | None:
        step = self._accounts.step
        accounts = [account for account in backlog.first(LOOK_ACCOUNTS, step) if not account.is_held]
        entitled = [account for account in accounts if backlog.is_eligible(account, step)]
        others = [account for account in accounts if account not in entitled and not self.is_ahead(account)]
        for group in (entitled, others):
            turn, reserved = self._order.among(group, backlog.round, None if self._reserved else can_start)
            self._reserved = self._reserved or reserved
            if turn is not None:
                return turn
        if can_start is not None:
            for account in accounts:
                backlog.pass_over(account)
        return None

    def applicant(self) -> Request | None:
        """The request that is not passed any more, or of those entitled in the highest class that waits, the least served."""
        if self._is_fruitless():
            return None
        if self._reserved is not None and self._reserved.status is RequestStatus.QUEUED:
            return self._reserved
        step, overdue = self._accounts.step, self._overdue_class()
        for priority, backlog in self.backlogs.items():
            if self._num_waiting[priority] and overdue in (None, priority):
                for account in backlog.first(LOOK_ACCOUNTS, step):
                    if account.waiting and backlog.is_eligible(account, step):
                        return account.waiting.head
        return None

    def _is_fruitless(self) -> bool:
        """Whether a victim was sought in vain a moment ago, and nobody has arrived, started or stopped since."""
        version, step = self._fruitless
        return version == self._accounts.version and not self._ahead and self._accounts.step - step < RETRY_STEPS

    @property
    def has_exception(self) -> bool:
        """Whether everybody waits for one request: one that was passed too often, or one of a class that was."""
        return self._reserved is not None or self._overdue_class() is not None

    def is_ahead(self, account: Account) -> bool:
        """Whether an account starts nothing now because it is ahead of others by more than the hysteresis."""
        lead = self.backlogs[account.priority].lead_at(account, self._accounts.step)
        return lead > self.settings.hysteresis_ps * account.weight

    def reweigh(self, account: Account, weight: int) -> None:
        """The weight of a tenant was changed: it is as far ahead per unit of weight as before."""
        backlog, step = self.backlogs[account.priority], self._accounts.step
        lead = backlog.lead_at(account, step)
        scaled = lead * weight // account.weight
        self._accounts.reweigh(account, weight)
        backlog.shift(account, scaled, step)

    def recovers(self, request: Request, num_lost: int) -> None:
        """One request of a tenant at a time is secured until it has gained as many tokens as it lost: waste is bounded, and
        everybody gets on, however little room there is."""
        account, costs = _account(request), self._accounts.costs
        start = request.num_computed_tokens
        self.wasted_ps += costs.prefill_ps(start, num_lost)
        if _recovering(account) is None:
            account.recovering = request
            request.secured_len = start + 2 * num_lost
            gain_ps = costs.decode_ps(num_lost, num_lost * request.secured_len)
            self.recovery_max_ps = max(self.recovery_max_ps, costs.prefill_ps(start, 2 * num_lost) + gain_ps)

    def _is_due_back(self, request: Request) -> bool:
        return request.num_preemptions > 0 and self._accounts.step - request.moved_step > TURN_STEPS

    def victim(self, applicant: Request) -> Request | None:
        """The youngest request of a lower class, of who holds most seats or blocks, or of who is furthest ahead; then of
        somebody in another class who pauses. A preempted request that has waited for long takes turns within its tenant."""
        account = _account(applicant)
        has_seat = len(self._accounts.running_requests) < self._context.max_num_seqs
        if not self._can_free(applicant):
            self._fruitless = (self._accounts.version, self._accounts.step)
            return None
        for holder in (
            self._lower_class(account),
            self._most_blocks(applicant) if has_seat else self._most_seats(account),
            self._furthest_ahead(account),
        ):
            victim = None if holder is None or holder is account else _youngest(holder)
            if victim is not None:
                return victim
        for paused in self._held:
            victim = None if paused is account else _youngest(paused)
            if victim is not None:
                return victim
        if self._is_due_back(applicant) and not has_seat:
            for request in reversed(account.running):
                if request is not account.recovering and self._accounts.step - request.moved_step > TURN_STEPS:
                    return request
        self._fruitless = (self._accounts.version, self._accounts.step)
        return None

    def _can_free(self, applicant: Request) -> bool:
        """Whether taking all that may be taken would give it enough blocks; shared ones are counted as if they were not."""
        account, kv = _account(applicant), self._context.kv
        found, needed = kv.num_spare, kv.blocks_for(applicant.num_tokens)
        if found >= needed:
            return True
        for other in self._accounts.seated:
            if other is account:
                continue
            recovering = _recovering(other)
            if recovering is not None:
                found -= len(recovering.block_table) + recovering.num_promised_blocks
            if other.is_held or other in self._ahead or (account.priority, other.priority) == DISPLACES:
                found += _blocks(other)
            elif other.priority is account.priority:
                share = kv.pool.num_blocks * other.weight // self._accounts.totals[other.priority].weight
                found += max(0, _blocks(other) - share)
        return found >= needed

    def _lower_class(self, account: Account) -> Account | None:
        if account.priority is not DISPLACES[0]:
            return None
        holder = self._accounts.totals[DISPLACES[1]].seats.most()
        return None if holder is None or next(reversed(holder.running)).is_aged else holder

    def _most_seats(self, account: Account) -> Account | None:
        """Who holds most seats per weight, if one of them makes the shares more equal: the move can never be undone."""
        holder = self._accounts.totals[account.priority].seats.most()
        if holder is None:
            return None
        mine, theirs = len(account.running) + 1, len(holder.running) - 1
        percent = 100 if mine == 1 else SEAT_PERCENT
        return holder if 100 * mine * holder.weight <= percent * theirs * account.weight else None

    def _most_blocks(self, applicant: Request) -> Account | None:
        """Who holds most blocks per weight and more than its share, if the applicant stays within its own."""
        account, kv = _account(applicant), self._context.kv
        total_weight = self._accounts.totals[account.priority].weight
        share = kv.pool.num_blocks * account.weight
        if (_blocks(account) + kv.blocks_for(applicant.num_tokens)) * total_weight > share:
            return None
        holders = [a for a in self._accounts.seated if a.priority is account.priority]
        holder = max(holders, key=lambda a: _blocks(a) * BLOCK_SCALE // a.weight, default=None)
        if holder is None or _blocks(holder) * total_weight <= kv.pool.num_blocks * holder.weight:
            return None
        return holder

    def _furthest_ahead(self, account: Account) -> Account | None:
        """The backlogged account with the largest lead per weight, while preemption wastes little or the pace demands it."""
        step, backlog = self._accounts.step, self.backlogs[account.priority]
        best: Account | None = None
        best_lead = 0
        for other in self._ahead:
            if other.priority is account.priority and other.running:
                lead = backlog.lead_at(other, step) // other.weight
                if lead > best_lead:
                    best, best_lead = other, lead
        if best is None or best_lead > self.settings.cap_ps:
            return best
        allowed_ps = WASTE_FREE_QUANTA * self.settings.quantum_ps + self._accounts.all.service_at(step) * WASTE_PERCENT // 100
        return best if self.wasted_ps < allowed_ps else None

    def growth_victim(self, running: Iterable[Request]) -> Request:
        """Somebody who pauses; else the youngest request of the account furthest ahead in the lowest class, but not the
        oldest request of all, so that one always gets on."""
        for account in self._held:
            paused = _youngest(account)
            if paused is not None:
                return paused
        step, oldest = self._accounts.step, next(iter(running))
        holders = [account for account in self._accounts.seated if next(reversed(account.running)) is not oldest]
        if not holders:
            return oldest
        lowest = max(RANK[account.priority] for account in holders)
        holder = max(
            (account for account in holders if RANK[account.priority] == lowest),
            key=lambda account: self.backlogs[account.priority].lead_at(account, step) // account.weight,
        )
        return next(reversed(holder.running))


def _account(request: Request) -> Account:
    assert request.account is not None, f"request {request.request_id} has no account"
    return request.account


def _recovering(account: Account) -> Request | None:
    """The request of an account that may not be preempted or paused, if it still is one."""
    request = account.recovering
    if request is not None and (request not in account.running or request.num_computed_tokens >= request.secured_len):
        request = account.recovering = None
    return request


def _youngest(account: Account) -> Request | None:
    """The youngest running request that may be preempted."""
    secured = _recovering(account)
    return next((request for request in reversed(account.running) if request is not secured), None)


def _is_paused(request: Request) -> bool:
    account = _account(request)
    return account.is_held and account.recovering is not request


def _blocks(account: Account) -> int:
    """What it holds and what it was promised."""
    return account.num_blocks + sum(request.num_promised_blocks for request in account.prefilling)
