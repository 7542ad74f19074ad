"""Rotation within a tenant: which running request is exchanged for a preempted one, when, and at what cost."""

from __future__ import annotations

import pytest

from engine.protocol import Priority
from engine.scheduling.accounts import Account, Accounts
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.costs import TokenCosts
from engine.scheduling.host_tier import HostTier
from engine.scheduling.kv_blocks import KvBlocks
from engine.scheduling.policy import SCAN_REQUESTS_MAX
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.request import Request, RequestStatus
from engine.scheduling.tenant_rotation import (
    CYCLE_STEPS,
    DUE_S,
    FREE_TOKENS,
    RATION,
    SCAN_ACCOUNTS_MAX,
    TURN_STEPS_MIN,
    TenantRotation,
)
from tests.support.scheduling import BLOCK_SIZE, make_request

COSTS = TokenCosts(prefill_token_ps=10**9, prefill_pair_ps=0)
START_S, START_STEP = 1000.0, 500
DUE_S_LATER = START_S + DUE_S + 0.01
CYCLE_LATER = START_STEP + CYCLE_STEPS


class Harness:
    """A rotation with running and waiting requests, a clock, and the requests preempted by the last exchange."""

    def __init__(self, num_blocks: int = 256) -> None:
        self.now_s = START_S
        self.accounts = Accounts(COSTS)
        self.accounts.step = START_STEP
        pool = BlockPool(num_blocks)
        cache = PrefixCache(pool, BLOCK_SIZE, is_shared=False)
        self.kv = KvBlocks(pool, costs=COSTS, prefix_cache=cache, host_tier=HostTier(0))
        self.rotation = TenantRotation(self.accounts, self.kv, lambda: self.now_s)
        self.preempted: list[Request] = []

    def account(self, tenant: str) -> Account:
        return self.accounts.find(tenant, Priority.STANDARD, 1)

    def add_running(self, name: str, *, tenant: str = "alice", num_tokens: int = 8, is_decoding: bool = True) -> Request:
        request = self._queued(name, tenant, num_tokens)
        self.accounts.start_running(request)
        self.kv.extend(request, num_tokens)
        request.move_to(RequestStatus.PREFILL)
        if is_decoding:
            request.move_to(RequestStatus.DECODE)
        request.moved_step = self.accounts.step
        return request

    def add_waiting(self, name: str, *, tenant: str = "alice", num_tokens: int = 8) -> Request:
        """A preempted request."""
        request = self._queued(name, tenant, num_tokens, num_preemptions=1)
        self.rotation.on_preempted(request)
        return request

    def start(self, request: Request) -> None:
        """Give a waiting request a seat."""
        self.accounts.start_running(request)
        request.move_to(RequestStatus.PREFILL)
        self.rotation.on_started(request)

    def _queued(self, name: str, tenant: str, num_tokens: int, *, num_preemptions: int = 0) -> Request:
        request = make_request(name, num_tokens, tenant=tenant)
        request.num_preemptions, request.account = num_preemptions, self.account(tenant)
        self.accounts.add_waiting(request, first=False)
        return request

    def preempt(self, request: Request) -> None:
        """Take the seat of a running request."""
        request.num_preemptions += 1
        self.accounts.stop_running(request)
        self.accounts.add_waiting(request, first=False)
        request.move_to(RequestStatus.QUEUED)
        self.rotation.on_preempted(request)

    def exchange(self) -> list[Request]:
        """The requests that are preempted in this step, one at most."""
        self.preempted = []
        self.rotation.exchange(self.preempted.append)
        return self.preempted

    def first_prefills(self, *, can_return: bool = True) -> list[Request]:
        return list(self.rotation.first_prefills(lambda _: can_return))


def test_a_preempted_request_gets_the_seat_with_the_longest_turn_when_it_is_due() -> None:
    harness = Harness()
    old, _, back = harness.add_running("old"), harness.add_running("young"), harness.add_waiting("back")
    harness.accounts.step = CYCLE_LATER
    harness.now_s = START_S + DUE_S
    assert harness.exchange() == []
    harness.now_s = DUE_S_LATER
    assert harness.exchange() == [old]
    assert harness.first_prefills() == [back]
    assert harness.first_prefills() == [], "it was given its chance"


def test_a_request_that_cannot_resume_at_once_must_become_due_again() -> None:
    harness = Harness()
    harness.add_running("old"), harness.add_waiting("back")
    harness.accounts.step, harness.now_s = CYCLE_LATER, DUE_S_LATER
    assert harness.exchange()
    assert harness.first_prefills(can_return=False) == []
    assert harness.first_prefills() == []


@pytest.mark.parametrize(
    ("num_waiting", "turn_steps"), [(1, CYCLE_STEPS), (3, 64), (24, TURN_STEPS_MIN), (100, TURN_STEPS_MIN)]
)
def test_turns_are_shorter_the_more_requests_wait(num_waiting: int, turn_steps: int) -> None:
    harness = Harness()
    first = harness.add_running("first")
    harness.add_running("second")
    for number in range(num_waiting):
        harness.add_waiting(str(number))
    harness.now_s = DUE_S_LATER
    harness.accounts.step = START_STEP + turn_steps - 1
    assert harness.exchange() == []
    harness.accounts.step = START_STEP + turn_steps
    assert harness.exchange() == [first]


def test_neither_a_prefill_nor_a_recovering_request_is_preempted() -> None:
    harness = Harness()
    harness.add_running("prefill", is_decoding=False)
    harness.account("alice").recovering = harness.add_running("recovers")
    third = harness.add_running("third")
    harness.add_waiting("back")
    harness.accounts.step, harness.now_s = CYCLE_LATER, DUE_S_LATER
    assert harness.exchange() == [third]


def test_a_tenant_exchanges_only_its_own_requests_and_none_while_it_is_paused() -> None:
    harness = Harness()
    harness.add_running("a"), harness.add_waiting("a back"), harness.add_waiting("c back", tenant="charlie")
    bob = harness.add_running("b", tenant="bob")
    back = harness.add_waiting("b back", tenant="bob")
    harness.account("alice").is_paused = True
    harness.accounts.step, harness.now_s = CYCLE_LATER, DUE_S_LATER
    assert harness.exchange() == [bob], "charlie has nothing that runs"
    assert harness.first_prefills() == [back]


def test_nothing_is_preempted_unless_the_waiting_request_would_fit() -> None:
    harness = Harness(num_blocks=7)
    small, other = (
        harness.add_running("small", num_tokens=2 * BLOCK_SIZE),
        harness.add_running("other", num_tokens=3 * BLOCK_SIZE),
    )
    harness.add_waiting("back", num_tokens=4 * BLOCK_SIZE + 1)
    harness.accounts.step, harness.now_s = CYCLE_LATER, DUE_S_LATER
    assert harness.kv.num_spare == 2
    assert harness.exchange() == [], "two spare blocks and two of the other are one too few"
    harness.kv.release(other)
    harness.kv.extend(other, 2 * BLOCK_SIZE)
    assert harness.exchange() == [small]


def test_a_request_that_has_ended_is_not_given_the_seat() -> None:
    harness = Harness()
    harness.add_running("old")
    back = harness.add_waiting("back")
    harness.accounts.step, harness.now_s = CYCLE_LATER, DUE_S_LATER
    assert harness.exchange()
    back.move_to(RequestStatus.FINISHED)
    assert harness.first_prefills() == []


def test_tokens_whose_blocks_are_still_cached_are_not_rationed() -> None:
    harness = Harness(num_blocks=1024)
    for name in "ab":
        harness.add_running(name)
    lost, kept = (harness.add_waiting(name, num_tokens=FREE_TOKENS + 4 * BLOCK_SIZE) for name in ("lost", "kept"))
    harness.kv.extend(kept, kept.num_tokens)
    kept.num_computed_tokens = 4 * BLOCK_SIZE
    harness.kv.release(kept, is_preempted=True)
    harness.accounts.step, harness.now_s = CYCLE_LATER, DUE_S_LATER
    assert harness.exchange()
    assert harness.first_prefills() == [lost]
    harness.start(lost)
    assert harness.exchange()
    assert harness.first_prefills() == [lost, kept]


def test_exchanges_that_recompute_many_tokens_are_rationed() -> None:
    harness = Harness(num_blocks=1024)
    ration_s = RATION * (FREE_TOKENS + 1) * COSTS.prefill_token_ps / 10**12
    assert ration_s < DUE_S
    for name in "abc":
        harness.add_running(name)
    first, second = (harness.add_waiting(name, num_tokens=FREE_TOKENS + 1) for name in ("first", "second"))
    short = harness.add_waiting("short", num_tokens=FREE_TOKENS)
    harness.accounts.step, harness.now_s = CYCLE_LATER, DUE_S_LATER
    started: list[Request] = []
    for passed_s in (0.0, 0.99 * ration_s, 1.01 * ration_s):
        harness.now_s = DUE_S_LATER + passed_s
        harness.exchange()
        for request in harness.first_prefills():
            if request not in started:
                started.append(request)
                harness.start(request)
    assert started == [first, short, second], "few tokens are free"


def test_a_request_started_by_the_policy_leaves_the_rotation_and_keeps_precedence_until_its_prompt_is_computed() -> None:
    harness = Harness()
    old = harness.add_running("old")
    started, back = harness.add_waiting("started"), harness.add_waiting("back")
    harness.start(started)
    harness.rotation.on_started(old)
    harness.accounts.step, harness.now_s = CYCLE_LATER, DUE_S_LATER
    assert harness.exchange() == [old]
    assert harness.first_prefills() == [started, back]
    harness.account("alice").is_paused = True
    assert harness.first_prefills() == []
    harness.account("alice").is_paused = False
    assert harness.first_prefills() == [started]
    started.move_to(RequestStatus.DECODE)
    assert harness.first_prefills() == []
    harness.exchange()
    assert list(harness.rotation._restarted) == []


def test_a_request_preempted_again_waits_behind_the_others() -> None:
    harness = Harness()
    harness.add_running("old")
    first, second = harness.add_waiting("first"), harness.add_waiting("second")
    harness.now_s += 1.0
    harness.start(first)
    harness.preempt(first)
    harness.accounts.step, harness.now_s = CYCLE_LATER, DUE_S_LATER
    harness.exchange()
    assert harness.first_prefills() == [second]


def test_requests_of_tenants_that_run_none_keep_no_other_from_its_turn() -> None:
    harness = Harness()
    for number in range(2 * SCAN_REQUESTS_MAX):
        harness.add_waiting(f"charlie{number}", tenant="charlie")
    old, back = harness.add_running("old"), harness.add_waiting("back")
    harness.accounts.step, harness.now_s = CYCLE_LATER, DUE_S_LATER
    assert harness.exchange() == [old]
    assert harness.first_prefills() == [back]


def test_each_of_many_tenants_has_its_turn() -> None:
    harness, num_tenants = Harness(), 2 * SCAN_ACCOUNTS_MAX
    for number in range(num_tenants):
        harness.add_waiting(f"first of {number}", tenant=f"idle{number}")
    for number in range(num_tenants):
        harness.add_running(f"running of {number}", tenant=f"busy{number}")
        harness.add_waiting(f"waiting of {number}", tenant=f"busy{number}")
    harness.accounts.step, harness.now_s = CYCLE_LATER, DUE_S_LATER
    returned = {request.tenant_id for _ in range(2 * num_tenants) if harness.exchange() for request in harness.first_prefills()}
    assert returned == {f"busy{number}" for number in range(num_tenants)}
