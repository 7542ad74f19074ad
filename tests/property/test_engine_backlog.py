"""The backlog of a priority class against its definition: the next accounts, the rise of the level, leads after joining."""

from __future__ import annotations

import math
import random

import pytest

from engine.protocol import Priority
from engine.scheduling.accounts import Account
from engine.scheduling.backlog import Backlog
from engine.scheduling.costs import TokenCosts

QUANTUM_PS, CAP_PS = 10, 25
COSTS = TokenCosts(decode_token_ps=3, decode_context_ps=0)
WEIGHTS = (1, 1, 2, 4, 1, 2)


class BacklogFuzz:
    """A backlog with operations on random accounts; each checks its effect against the definition."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.step = 0
        self.backlog = Backlog(QUANTUM_PS, CAP_PS)
        self.accounts = [Account(str(n), Priority.STANDARD, weight, COSTS) for n, weight in enumerate(WEIGHTS)]
        self.members: set[Account] = set()
        self.aside: set[Account] = set()
        self.lowest_aside = math.inf  # round of those that were set aside in this step
        self.last: Account | None = None  # account moved to the back of its round, as long as nothing else has changed

    def round_of(self, account: Account) -> int:
        return account.position_at(self.step) // (QUANTUM_PS * account.weight) + 1

    def join(self, account: Account) -> None:
        self.last = None
        before = self.backlog.lead_at(account, self.step)
        if account in self.members:
            return
        self.backlog.join(account, self.step)
        self.members.add(account)
        after = self.backlog.lead_at(account, self.step)
        assert after == min(max(before, -QUANTUM_PS * account.weight), CAP_PS * account.weight)

    def leave(self, account: Account) -> None:
        self.backlog.leave(account)
        self.members.discard(account)
        self.aside.discard(account)
        self.last = None

    def charge(self, account: Account) -> None:
        account.charge(self.rng.randint(0, 120))
        self.last = None

    def set_lead(self, account: Account) -> None:
        self.last = None
        self.aside.discard(account)
        lead_ps = self.rng.randint(-150, 150)
        self.backlog.set_lead(account, lead_ps, self.step)
        if account in self.members:
            lead_ps = min(max(lead_ps, -QUANTUM_PS * account.weight), CAP_PS * account.weight)
        assert self.backlog.lead_at(account, self.step) == lead_ps

    def decode(self, account: Account) -> None:
        self.last = None
        if account.num_decoding:
            account.remove_decode(account.context_at(self.step), self.step)
        else:
            account.add_decode(1, self.step)

    def begin_step(self, _: Account) -> None:
        self.step += self.rng.randint(1, 9)
        self.backlog.begin_step(self.step)
        self.aside.clear()
        self.lowest_aside = math.inf
        self.last = None

    def set_aside(self, account: Account) -> None:
        if account in self.members and account not in self.aside:
            assert account.round is not None
            self.lowest_aside = min(self.lowest_aside, account.round)
            self.aside.add(account)
            self.backlog.set_aside(account)

    def move_to_back(self, account: Account) -> None:
        self.next_accounts(account, limit=len(WEIGHTS))  # puts all accounts into the buckets of their rounds
        if account in self.members and account not in self.aside:
            self.last = account
            self.backlog.move_to_back(account)

    def next_accounts(self, _: Account, limit: int | None = None) -> None:
        limit = limit or self.rng.randint(1, len(WEIGHTS))
        level = self.backlog.round
        found = self.backlog.next_accounts(limit, self.step)
        waiting = self.members - self.aside
        assert len(found) == len(set(found)) == min(limit, len(waiting))
        assert waiting.issuperset(found)
        rounds = [self.round_of(account) for account in found]
        assert rounds == sorted(rounds)
        assert all(self.round_of(account) >= rounds[-1] for account in waiting.difference(found))
        if found and rounds[0] <= self.lowest_aside:
            assert self.backlog.round == max(level, rounds[0])
            assert self.backlog.is_eligible(found[0], self.step)
        assert level <= self.backlog.round <= max(level, self.lowest_aside)
        if self.last in found:
            behind = found[found.index(self.last) + 1 :]
            assert self.round_of(self.last) not in map(self.round_of, behind), "it goes behind the others of its round"

    def check_members(self) -> None:
        assert sorted(map(id, self.backlog)) == sorted(map(id, self.members))
        assert {account for account in self.accounts if account.round is not None} == self.members
        for account in self.accounts:
            is_below_level = self.round_of(account) <= self.backlog.round
            assert self.backlog.is_eligible(account, self.step) == is_below_level
        assert all(self.backlog._buckets.values()), "an empty bucket was kept"
        assert sorted(self.backlog._rounds) == sorted(self.backlog._in_heap)


@pytest.mark.parametrize("first", [0, 50, 100, 150])
def test_next_accounts_are_those_of_the_lowest_rounds_after_any_operations(first: int) -> None:
    for seed in range(first, first + 50):
        fuzz = BacklogFuzz(rng := random.Random(seed))
        operations = [fuzz.join, fuzz.leave, fuzz.charge, fuzz.set_lead, fuzz.decode, fuzz.begin_step, fuzz.set_aside]
        operations += [fuzz.move_to_back, fuzz.next_accounts]
        for _ in range(100):
            (operation,) = rng.choices(operations, [6, 1, 3, 1, 1, 2, 3, 2, 4])
            operation(rng.choice(fuzz.accounts))
            fuzz.check_members()
