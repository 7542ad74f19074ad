"""Leads: how far each account is ahead of its class. They decide which may lose a seat and which pause. Integers only.

Leads change in every step, but are computed only when they can matter: decoding alone cannot carry an account across the next
threshold before a known step (`Account.steps_within`), and every other charge is followed by an update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.protocol import Priority
from engine.scheduling.accounts import Account, Accounts
from engine.scheduling.backlog import Backlog
from engine.scheduling.request import Request

WATCH_STEPS_MAX = 256
"""Every account is checked at least this often, which keeps the calendar of checks short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FairSettings:
    """In picoseconds per unit of weight. `quantum_ps` (Q): the most that idling earns. An account ahead of the level by more
    than `hysteresis_ps` may lose a seat to an entitled account; ahead by more than `cap_ps` it pauses."""

    quantum_ps: int
    hysteresis_ps: int
    cap_ps: int


class LeadTracker:
    """Leads of the backlogged accounts with running requests."""

    def __init__(self, accounts: Accounts, backlogs: Mapping[Priority, Backlog], settings: FairSettings) -> None:
        self.settings = settings
        self.ahead: dict[Account, None] = {}  # beyond the hysteresis at their last update
        self.paused: dict[Account, None] = {}  # pausing in this step
        self.version = 0  # grows when another account is ahead
        self._over_cap: dict[Account, None] = {}  # beyond the cap at their last update
        self._accounts = accounts
        self._backlogs = backlogs
        self._watched: dict[int, list[Account]] = {}

    def lead_of(self, account: Account) -> int:
        """In picoseconds per unit of weight, rounded down."""
        return self._backlogs[account.priority].lead_at(account, self._accounts.step) // account.weight

    def begin_step(self) -> None:
        """Update the accounts whose check is due, and those over the cap."""
        step = self._accounts.step
        watched = self._watched.pop(step, None)
        if watched is None and not self._over_cap:
            return
        for backlog in self._backlogs.values():
            backlog.next_accounts(1, step)  # raises the level
        for account in watched or ():
            if account.watch_step == step:
                self.update(account)
        for account in list(self._over_cap):
            self.update(account)

    def update(self, account: Account) -> None:
        """Record which thresholds the lead of an account exceeds, and when it could cross the next one."""
        if account.round is None or not account.running:
            self.ahead.pop(account, None)
            self._over_cap.pop(account, None)
            return
        lead = self.lead_of(account)
        if lead >= self.settings.cap_ps:
            self._over_cap[account] = None
            self._note_ahead(account)
            return
        self._over_cap.pop(account, None)
        if lead >= self.settings.hysteresis_ps:
            self._note_ahead(account)
            self._watch(account, self.settings.cap_ps - lead)
        else:
            self.ahead.pop(account, None)
            self._watch(account, self.settings.hysteresis_ps - lead)

    def _note_ahead(self, account: Account) -> None:
        if account not in self.ahead:
            self.ahead[account] = None
            self.version += 1

    def _watch(self, account: Account, slack_ps: int) -> None:
        if not account.num_decoding:
            return
        step = self._accounts.step
        latest = step + min(account.steps_within(slack_ps * account.weight, step), WATCH_STEPS_MAX)
        if not step < account.watch_step <= latest:
            account.watch_step = latest
            self._watched.setdefault(latest, []).append(account)

    def pause_changes(self) -> tuple[list[Account], list[Account]]:
        """Accounts that pause from now on, and those that resume. One whose request is no longer protected pauses entirely."""
        if not self._over_cap and not self.paused:
            return [], []
        protected = {account for account in self._over_cap if account.recovering is not None}
        for account in protected:
            protected_request(account)  # forgets a request that is protected no more
        pause = [account for account in self._over_cap if account not in self.paused or account in protected]
        resume = [account for account in self.paused if account not in self._over_cap]
        self.paused.clear()
        self.paused.update(self._over_cap)
        return pause, resume


def protected_request(account: Account) -> Request | None:
    """`account.recovering` while it is protected from preemption and pauses; forgets it afterwards."""
    request = account.recovering
    if request is not None and request.num_computed_tokens >= request.protected_len:
        request = account.recovering = None
    return request
