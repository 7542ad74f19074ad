"""The backlog of a class against its definition: who is next, how far the level rises, and what joining forgives."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.protocol import Priority
from engine.scheduling.accounts import Account
from engine.scheduling.backlog import Backlog
from engine.scheduling.costs import TokenCosts

QUANTUM_PS, CAP_PS = 10, 25
COSTS = TokenCosts(decode_token_ps=3, decode_context_ps=0)
WEIGHTS = (1, 1, 2, 4, 1, 2)
numbers = st.integers(0, len(WEIGHTS) - 1)


class BacklogMachine(RuleBasedStateMachine):
    """Accounts join, leave, are charged, decode, are set aside and moved to the back."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.backlog = Backlog(QUANTUM_PS, CAP_PS)
        self.accounts = [Account(str(n), Priority.STANDARD, weight, COSTS) for n, weight in enumerate(WEIGHTS)]
        self.members: set[Account] = set()
        self.aside: set[Account] = set()
        self.lowest_aside = math.inf  # round of those that were set aside in this step
        self.last: Account | None = None  # moved behind the others of its round, and nothing has changed since

    def round_of(self, account: Account) -> int:
        return account.position_at(self.step) // (QUANTUM_PS * account.weight) + 1

    @rule(number=numbers)
    def join(self, number: int) -> None:
        account, self.last = self.accounts[number], None
        before = self.backlog.lead_at(account, self.step)
        if account in self.members:
            return
        self.backlog.join(account, self.step)
        self.members.add(account)
        after = self.backlog.lead_at(account, self.step)
        assert after == min(max(before, -QUANTUM_PS * account.weight), CAP_PS * account.weight)

    @rule(number=numbers)
    def leave(self, number: int) -> None:
        self.backlog.leave(self.accounts[number])
        self.members.discard(self.accounts[number])
        self.aside.discard(self.accounts[number])
        self.last = None

    @rule(number=numbers, cost_ps=st.integers(0, 120))
    def charge(self, number: int, cost_ps: int) -> None:
        self.accounts[number].charge(cost_ps)
        self.last = None

    @rule(number=numbers, lead_ps=st.integers(-150, 150))
    def set_lead(self, number: int, lead_ps: int) -> None:
        account, self.last = self.accounts[number], None
        if account in self.aside:
            return
        self.backlog.set_lead(account, lead_ps, self.step)
        if account in self.members:
            lead_ps = min(max(lead_ps, -QUANTUM_PS * account.weight), CAP_PS * account.weight)
        assert self.backlog.lead_at(account, self.step) == lead_ps

    @rule(number=numbers)
    def decode(self, number: int) -> None:
        account, self.last = self.accounts[number], None
        if account.num_decoding:
            account.remove_decode(account.context_at(self.step), self.step)
        else:
            account.add_decode(1, self.step)

    @rule(num_steps=st.integers(1, 9))
    def begin_step(self, num_steps: int) -> None:
        self.step += num_steps
        self.backlog.begin_step(self.step)
        self.aside.clear()
        self.lowest_aside = math.inf
        self.last = None

    @rule(number=numbers)
    def set_aside(self, number: int) -> None:
        account = self.accounts[number]
        if account in self.members and account not in self.aside and account.round is not None:
            self.lowest_aside = min(self.lowest_aside, account.round)
            self.aside.add(account)
            self.backlog.set_aside(account)

    @precondition(lambda self: self.members - self.aside)
    @rule(data=st.data())
    def move_to_back(self, data: st.DataObject) -> None:
        self.next_accounts(len(WEIGHTS))  # all of them stand in the buckets of their rounds now
        candidates = [account for account in self.accounts if account in self.members and account not in self.aside]
        self.last = data.draw(st.sampled_from(candidates))
        self.backlog.move_to_back(self.last)

    @rule(limit=st.integers(1, len(WEIGHTS)))
    def next_accounts(self, limit: int) -> None:
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

    @invariant()
    def every_member_stands_in_one_place(self) -> None:
        assert sorted(map(id, self.backlog)) == sorted(map(id, self.members))
        assert {account for account in self.accounts if account.round is not None} == self.members
        assert all(self.backlog._buckets.values()), "an empty bucket was kept"
        assert sorted(self.backlog._rounds) == sorted(self.backlog._in_heap)


TestBacklog = BacklogMachine.TestCase
TestBacklog.settings = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True)
