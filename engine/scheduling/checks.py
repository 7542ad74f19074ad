"""Invariants of a scheduler between two steps, checked by tests and by the idle engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.scheduling.accounts import Accounts
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.request import Request, RequestStatus


def check_requests(running: Sequence[Request], waiting: Sequence[Request], limits: SchedulerLimits) -> None:
    """Raise `AssertionError` unless each live request either runs or waits, in the right state and with the right blocks."""
    assert len(running) + len(waiting) == len({*running, *waiting}), "a request is live twice"
    assert len(running) <= limits.max_num_seqs, "more requests run than max_num_seqs"
    for request in running:
        assert request.status in (RequestStatus.PREFILL, RequestStatus.DECODE), (
            f"{request.request_id} runs while {request.status}"
        )
        slots = len(request.block_table) * limits.block_size
        assert request.num_computed_tokens <= slots, f"{request.request_id} computed more tokens than it has slots"
    for request in waiting:
        assert request.status is RequestStatus.QUEUED, f"{request.request_id} waits while {request.status}"
        assert not request.block_table, f"{request.request_id} waits and holds blocks"


def check_accounts(accounts: Accounts) -> None:
    """Raise `AssertionError` unless the accounts agree with the requests that run. Visits every account."""
    running = Counter(request.account for request in accounts.running_requests)
    for account in accounts:
        name = f"{account.tenant_id}/{account.priority}"
        assert len(account.running) == running[account], f"{name} counts its seats wrongly"
        assert account.num_blocks == sum(len(r.block_table) for r in account.running), f"{name} counts its blocks wrongly"
        prefilling = {r for r in account.running if r.status is RequestStatus.PREFILL}
        assert prefilling == set(account.prefilling), f"{name} lists its prefills wrongly"
    assert set(accounts.seated) == {account for account in accounts if account.running}, "the seated accounts are wrong"
    for priority, totals in accounts.totals.items():
        active = [account for account in accounts if account.priority is priority and account.is_active]
        assert totals.weight == sum(account.weight for account in active), f"the weight of class {priority} is wrong"
        most = max((len(account.running) / account.weight for account in active), default=0)
        holder = totals.seats.largest_holder()
        assert (0 if holder is None else len(holder.running) / holder.weight) == most, "the largest holder is wrong"
