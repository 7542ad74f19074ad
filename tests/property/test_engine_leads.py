"""Leads are recomputed in few steps only, yet accounts that are ahead or over the cap are known in every step."""

from __future__ import annotations

import random

import pytest

from engine.protocol import Priority
from engine.scheduling.accounts import Account, Accounts
from engine.scheduling.backlog import Backlog
from engine.scheduling.costs import TokenCosts
from engine.scheduling.lead_tracking import WATCH_STEPS_MAX, FairSettings, LeadTracker, protected_request
from tests.support.scheduling import make_request

SETTINGS = FairSettings(quantum_ps=100, hysteresis_ps=300, cap_ps=900)
COSTS = TokenCosts(decode_token_ps=7, decode_context_ps=1)
WEIGHTS = (1, 2, 4, 1)
CLASSES = (Priority.STANDARD, Priority.STANDARD, Priority.STANDARD, Priority.BATCH)


class LeadFuzz:
    """Accounts that run, decode, are charged and leave in random order; each step compares all leads with their definition."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.accounts = Accounts(COSTS)
        self.backlogs = {priority: Backlog(SETTINGS.quantum_ps, SETTINGS.cap_ps) for priority in Priority}
        self.leads = LeadTracker(self.accounts, self.backlogs, SETTINGS)
        self.decodes: list[list[int]] = [[] for _ in WEIGHTS]  # context of each, less the number of the step
        self.members = [self.accounts.find(str(number), CLASSES[number], weight) for number, weight in enumerate(WEIGHTS)]

    def run(self, number: int) -> None:
        account = self.members[number]
        if not account.running:
            account.running[make_request(str(number), 1)] = None
        self.backlogs[account.priority].join(account, self.accounts.step)
        self.leads.update(account)

    def leave(self, number: int) -> None:
        account = self.members[number]
        self.backlogs[account.priority].leave(account)
        self.leads.update(account)
        assert account not in self.leads.ahead

    def end_all(self, number: int) -> None:
        self.members[number].running.clear()
        self.leads.update(self.members[number])
        assert self.members[number] not in self.leads.ahead, "it has nothing to lose"

    def decode(self, number: int) -> None:
        context_len = self.rng.randint(0, 60)
        self.members[number].add_decode(context_len, self.accounts.step)
        self.decodes[number].append(context_len - self.accounts.step)
        self.leads.update(self.members[number])

    def end(self, number: int) -> None:
        if self.decodes[number]:
            self.members[number].remove_decode(self.decodes[number].pop() + self.accounts.step, self.accounts.step)

    def charge(self, number: int) -> None:
        self.members[number].charge(self.rng.choice((10, 200, 1000, 4000)))
        self.leads.update(self.members[number])

    def steps(self, _: int) -> None:
        for _ in range(self.rng.choice((1, 2, 5, 40))):
            self.accounts.step += 1
            self.leads.begin_step()
            self.check()
        before = set(self.leads.paused)
        pause, resume = self.leads.pause_changes()
        over_cap = {account for account in self.tracked() if self.leads.lead_of(account) >= SETTINGS.cap_ps}
        assert (set(pause), set(resume)) == (over_cap - before, before - over_cap)
        assert set(self.leads.paused) == over_cap

    def tracked(self) -> list[Account]:
        return [account for account in self.members if account.round is not None and account.running]

    def check(self) -> None:
        for account in self.tracked():
            lead, step = self.leads.lead_of(account), self.accounts.step
            exact = account.position_at(step) - self.backlogs[account.priority].round * SETTINGS.quantum_ps * account.weight
            assert lead == exact // account.weight
            assert lead < SETTINGS.hysteresis_ps or account in self.leads.ahead, "nobody knows that it is ahead"
            if account.num_decoding and lead < SETTINGS.cap_ps:
                assert step < account.watch_step <= step + WATCH_STEPS_MAX
        assert set(self.leads.ahead) <= set(self.tracked())
        if any(self.leads.lead_of(account) >= SETTINGS.cap_ps for account in self.tracked()):
            for priority, backlog in self.backlogs.items():
                members = [account for account in self.members if account.priority is priority and account.round is not None]
                entitled = [account for account in members if backlog.is_eligible(account, self.accounts.step)]
                assert entitled or not members, "the level waits for nobody, so who is over the cap need not wait longer"


@pytest.mark.parametrize("first", [0, 25, 50, 75])
def test_accounts_ahead_and_over_the_cap_are_known_in_every_step(first: int) -> None:
    for seed in range(first, first + 25):
        fuzz = LeadFuzz(rng := random.Random(seed))
        operations = [fuzz.run, fuzz.leave, fuzz.end_all, fuzz.decode, fuzz.end, fuzz.charge, fuzz.steps]
        for _ in range(60):
            (operation,) = rng.choices(operations, [4, 1, 1, 3, 2, 3, 6])
            operation(rng.randrange(len(WEIGHTS)))


def test_a_recovering_request_is_protected_until_it_has_recomputed_its_tokens() -> None:
    account = Accounts(COSTS).find("alice", Priority.STANDARD, 1)
    assert protected_request(account) is None
    request = make_request("a", 1)
    request.protected_len, request.num_computed_tokens = 5, 4
    account.recovering = request
    assert protected_request(account) is request
    request.num_computed_tokens = 5
    assert protected_request(account) is None
    assert account.recovering is None


def test_an_account_is_paused_again_when_its_request_is_no_longer_protected() -> None:
    accounts, request = Accounts(COSTS), make_request("a", 1)
    leads = LeadTracker(accounts, backlogs := {Priority.STANDARD: Backlog(100, 900)}, SETTINGS)
    account = accounts.find("alice", Priority.STANDARD, 1)
    account.running[request], account.recovering, request.protected_len = None, request, 5
    backlogs[Priority.STANDARD].join(account, 0)
    account.charge(5000)
    leads.update(account)
    assert leads.pause_changes() == ([account], [])
    request.num_computed_tokens = 5
    assert leads.pause_changes() == ([account], []), "its last request pauses too"
    assert leads.pause_changes() == ([], []), "it is forgotten"


def test_version_changes_only_when_an_account_becomes_ahead() -> None:
    accounts = Accounts(COSTS)
    leads = LeadTracker(accounts, backlogs := {Priority.STANDARD: Backlog(100, 900)}, SETTINGS)
    account = accounts.find("alice", Priority.STANDARD, 1)
    account.running[make_request("a", 1)] = None
    backlogs[Priority.STANDARD].join(account, 0)
    leads.update(account)
    assert leads.version == 0
    account.charge(450)
    for _ in range(2):
        leads.update(account)
        assert leads.version == 1
    account.charge(-400)
    leads.update(account)
    account.charge(1500)
    leads.update(account)
    assert leads.version == 2
