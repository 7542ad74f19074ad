"""Preemption: which running request gives up its seat or blocks to an entitled one. Knows no torch.

The victim's account holds most, is furthest ahead, or pauses. The seats and blocks of a class belong to its accounts in
proportion to their weights. A request is preempted for another only if the reverse would not be done next, so that accounts
never preempt each other in turn.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.protocol import Priority
from engine.scheduling.accounts import Account, account_of
from engine.scheduling.lead_tracking import LeadTracker, protected_request
from engine.scheduling.policy import PolicyContext
from engine.scheduling.request import Request

SEAT_PERCENT = 87
"""A seat moves to an account that already has one only if its share is this far below the other's, to avoid churn."""

BLOCK_SCALE = 1 << 20
RANK = {priority: rank for rank, priority in enumerate(Priority)}

DISPLACES = (Priority.INTERACTIVE, Priority.BATCH)
"""Waiting requests of the first class may preempt running ones of the second, whatever service either account had."""

TURN_STEPS = 128
"""Least number of steps that a preempted request waits, and another runs, before they swap within their tenant."""

WASTE_PERCENT, WASTE_FREE_QUANTA = 2, 64
"""Preemption for service stops when more than this share of all service was computed twice; this many quanta are free."""


class Preemption:
    """Chooses victims."""

    def __init__(self, context: PolicyContext, leads: LeadTracker) -> None:
        self.wasted_ps = 0
        self._context = context
        self._accounts = context.accounts
        self._leads = leads

    def is_below_share(self, account: Account) -> bool:
        """Whether an account has less than its share of the seats and of the blocks."""
        total_weight = self._accounts.totals[account.priority].weight
        return (
            len(account.running) * total_weight < self._context.max_num_seqs * account.weight
            and account.num_blocks * total_weight < self._context.kv.pool.num_blocks * account.weight
        )

    def victim(self, applicant: Request) -> Request | None:
        """The running request that makes room for `applicant`, or None: the youngest of a lower class, of the account that
        holds most seats or blocks, of the account furthest ahead, or of one that pauses. Otherwise an applicant that was
        preempted long ago takes turns with a request of its own account."""
        account = account_of(applicant)
        has_seat = len(self._accounts.running_requests) < self._context.max_num_seqs
        if not self._can_free(applicant):
            return None
        for holder in (
            self._lower_class(account),
            self._most_blocks(applicant) if has_seat else self._most_seats(account),
            self._furthest_ahead(account),
            *self._leads.paused,
        ):
            if holder is not None and holder is not account:
                victim = _youngest(holder)
                if victim is not None:
                    return victim
        if self._is_due_back(applicant) and not has_seat:
            for request in reversed(account.running):
                if request is not account.recovering and self._accounts.step - request.moved_step > TURN_STEPS:
                    return request
        return None

    def _is_due_back(self, request: Request) -> bool:
        return request.num_preemptions > 0 and self._accounts.step - request.moved_step > TURN_STEPS

    def _can_free(self, applicant: Request) -> bool:
        """Whether taking every block that may be taken would free enough; shared blocks are counted as if they were not
        shared."""
        account, kv = account_of(applicant), self._context.kv
        found, needed = kv.num_spare, kv.blocks_for(applicant.num_tokens)
        if found >= needed:
            return True
        for other in self._accounts.seated:
            if other is account:
                continue
            protected = protected_request(other)
            if protected is not None:
                found -= len(protected.block_table) + protected.num_promised_blocks
            if other.is_paused or other in self._leads.ahead or (account.priority, other.priority) == DISPLACES:
                found += _blocks(other)
            elif other.priority is account.priority:
                share = kv.pool.num_blocks * other.weight // self._accounts.totals[other.priority].weight
                found += max(0, _blocks(other) - share)
        return found >= needed

    def _lower_class(self, account: Account) -> Account | None:
        if account.priority is not DISPLACES[0]:
            return None
        holder = self._accounts.totals[DISPLACES[1]].seats.largest_holder()
        return None if holder is None or next(reversed(holder.running)).is_aged else holder

    def _most_seats(self, account: Account) -> Account | None:
        """The account with most seats per weight, if moving one makes the shares more equal. The move is never reversed."""
        holder = self._accounts.totals[account.priority].seats.largest_holder()
        if holder is None:
            return None
        own_seats, holder_seats = len(account.running) + 1, len(holder.running) - 1
        percent = 100 if own_seats == 1 else SEAT_PERCENT
        return holder if 100 * own_seats * holder.weight <= percent * holder_seats * account.weight else None

    def _most_blocks(self, applicant: Request) -> Account | None:
        """The account with most blocks per weight and more than its share, if the applicant stays within its own share."""
        account, kv = account_of(applicant), self._context.kv
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
        """The backlogged account with the largest lead per weight, while preemption wastes little or that account pauses."""
        best: Account | None = None
        best_lead = self._leads.settings.hysteresis_ps
        for other in self._leads.ahead:
            if other.priority is account.priority and other.running:
                lead = self._leads.lead_of(other)
                if lead > best_lead:
                    best, best_lead = other, lead
        if best is None or best_lead > self._leads.settings.cap_ps:
            return best
        allowed_ps = (
            WASTE_FREE_QUANTA * self._leads.settings.quantum_ps
            + self._accounts.aggregate.service_at(self._accounts.step) * WASTE_PERCENT // 100
        )
        return best if self.wasted_ps < allowed_ps else None

    def growth_victim(self, running: Iterable[Request]) -> Request:
        """A request of an account that pauses; otherwise the youngest of the account furthest ahead in the lowest class. Never
        the oldest request of all, so that one always makes progress."""
        for account in self._leads.paused:
            paused = _youngest(account)
            if paused is not None:
                return paused
        oldest = next(iter(running))
        holders = [account for account in self._accounts.seated if next(reversed(account.running)) is not oldest]
        if not holders:
            return oldest
        lowest = max(RANK[account.priority] for account in holders)
        holder = max(
            (account for account in holders if RANK[account.priority] == lowest),
            key=self._leads.lead_of,
        )
        return next(reversed(holder.running))


def _youngest(account: Account) -> Request | None:
    """The youngest running request that may be preempted."""
    protected = protected_request(account)
    return next((request for request in reversed(account.running) if request is not protected), None)


def _blocks(account: Account) -> int:
    """Blocks that an account holds or was promised."""
    return account.num_blocks + sum(request.num_promised_blocks for request in account.prefilling)
