"""Turns within a tenant: which running request makes room for a preempted one, when, and at what cost."""

from __future__ import annotations

import pytest

from engine.protocol import Priority
from engine.scheduling.accounts import Account, Accounts
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.costs import TokenCosts
from engine.scheduling.kv_blocks import KvBlocks
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.request import Request, RequestStatus
from engine.scheduling.tenant_rotation import (
    CYCLE_STEPS,
    DUE_S,
    FREE_TOKENS,
    RATION,
    TURN_STEPS_MIN,
    TenantRotation,
)
from tests.support.scheduling import BLOCK_SIZE, make_request

COSTS = TokenCosts(prefill_token_ps=10**9, prefill_pair_ps=0)
START_S, START_STEP = 1000.0, 500
DUE_S_LATER = START_S + DUE_S + 0.01
CYCLE_LATER = START_STEP + CYCLE_STEPS


class Rotation:
    """A rotation with requests in whatever states a test wants, and those that it has preempted."""

    def __init__(self, num_blocks: int = 256) -> None:
        self.now_s = START_S
        self.accounts = Accounts(COSTS)
        self.accounts.step = START_STEP
        pool = BlockPool(num_blocks)
        self.kv = KvBlocks(pool, costs=COSTS, prefix_cache=PrefixCache(pool, BLOCK_SIZE, is_shared=False))
        self.rotation = TenantRotation(self.accounts, self.kv, lambda: self.now_s)
        self.preempted: list[Request] = []

    def account(self, tenant: str) -> Account:
        return self.accounts.find(tenant, Priority.STANDARD, 1)

    def running(self, name: str, *, tenant: str = "alice", num_tokens: int = 8, is_decoding: bool = True) -> Request:
        request = self._queued(name, tenant, num_tokens)
        self.accounts.start_running(self.account(tenant), request)
        self.kv.extend(request, num_tokens)
        request.move_to(RequestStatus.PREFILL)
        if is_decoding:
            request.move_to(RequestStatus.DECODE)
        request.moved_step = self.accounts.step
        return request

    def waiting(self, name: str, *, tenant: str = "alice", num_tokens: int = 8) -> Request:
        """A preempted request."""
        request = self._queued(name, tenant, num_tokens, num_preemptions=1)
        self.rotation.on_preempted(request)
        return request

    def _queued(self, name: str, tenant: str, num_tokens: int, *, num_preemptions: int = 0) -> Request:
        request = make_request(name, num_tokens, tenant=tenant)
        request.num_preemptions, request.account = num_preemptions, self.account(tenant)
        self.accounts.add_waiting(self.account(tenant), request, first=False)
        return request

    def exchange(self) -> list[Request]:
        """The requests that are preempted in this step, one at most."""
        self.preempted = []
        self.rotation.exchange(self.preempted.append)
        return self.preempted

    def first_prefills(self, *, can_return: bool = True) -> list[Request]:
        return list(self.rotation.first_prefills(lambda _: can_return))


def test_a_preempted_request_gets_the_seat_with_the_longest_turn_when_it_is_due() -> None:
    life = Rotation()
    old, _, back = life.running("old"), life.running("young"), life.waiting("back")
    life.accounts.step = CYCLE_LATER
    life.now_s = START_S + DUE_S
    assert life.exchange() == []
    life.now_s = DUE_S_LATER
    assert life.exchange() == [old]
    assert life.first_prefills() == [back]
    assert life.first_prefills() == [], "it was given its chance"


def test_who_cannot_come_back_at_once_has_to_be_due_again() -> None:
    life = Rotation()
    life.running("old"), life.waiting("back")
    life.accounts.step, life.now_s = CYCLE_LATER, DUE_S_LATER
    assert life.exchange()
    assert life.first_prefills(can_return=False) == []
    assert life.first_prefills() == []


@pytest.mark.parametrize(
    ("num_waiting", "turn_steps"), [(1, CYCLE_STEPS), (3, 64), (24, TURN_STEPS_MIN), (100, TURN_STEPS_MIN)]
)
def test_a_turn_is_shorter_the_more_wait_for_theirs(num_waiting: int, turn_steps: int) -> None:
    life = Rotation()
    first = life.running("first")
    life.running("second")
    for number in range(num_waiting):
        life.waiting(str(number))
    life.now_s = DUE_S_LATER
    life.accounts.step = START_STEP + turn_steps - 1
    assert life.exchange() == []
    life.accounts.step = START_STEP + turn_steps
    assert life.exchange() == [first]


def test_neither_a_prefill_nor_a_request_that_recovers_makes_room() -> None:
    life = Rotation()
    life.running("prefill", is_decoding=False)
    life.account("alice").recovering = life.running("recovers")
    third = life.running("third")
    life.waiting("back")
    life.accounts.step, life.now_s = CYCLE_LATER, DUE_S_LATER
    assert life.exchange() == [third]


def test_a_tenant_changes_places_with_itself_alone_and_not_while_it_pauses() -> None:
    life = Rotation()
    life.running("a"), life.waiting("a back"), life.waiting("c back", tenant="charlie")
    bob = life.running("b", tenant="bob")
    back = life.waiting("b back", tenant="bob")
    life.account("alice").is_paused = True
    life.accounts.step, life.now_s = CYCLE_LATER, DUE_S_LATER
    assert life.exchange() == [bob], "charlie has nothing that runs"
    assert life.first_prefills() == [back]


def test_room_is_made_only_where_it_is_enough() -> None:
    life = Rotation(num_blocks=7)
    small, other = life.running("small", num_tokens=2 * BLOCK_SIZE), life.running("other", num_tokens=3 * BLOCK_SIZE)
    life.waiting("back", num_tokens=4 * BLOCK_SIZE + 1)
    life.accounts.step, life.now_s = CYCLE_LATER, DUE_S_LATER
    assert life.kv.num_spare == 2
    assert life.exchange() == [], "two spare blocks and two of the other are one too few"
    life.kv.release(other)
    life.kv.extend(other, 2 * BLOCK_SIZE)
    assert life.exchange() == [small]


def test_who_has_started_or_ended_before_prompts_are_planned_is_not_given_the_seat() -> None:
    life = Rotation()
    life.running("old")
    back = life.waiting("back")
    life.accounts.step, life.now_s = CYCLE_LATER, DUE_S_LATER
    assert life.exchange()
    back.move_to(RequestStatus.FINISHED)
    assert life.first_prefills() == []


def test_tokens_whose_blocks_are_still_there_are_not_rationed() -> None:
    life = Rotation(num_blocks=1024)
    for name in "ab":
        life.running(name)
    lost, kept = (life.waiting(name, num_tokens=FREE_TOKENS + 4 * BLOCK_SIZE) for name in ("lost", "kept"))
    life.kv.extend(kept, kept.num_tokens)
    kept.num_computed_tokens = 4 * BLOCK_SIZE
    life.kv.release(kept, is_preempted=True)
    life.accounts.step, life.now_s = CYCLE_LATER, DUE_S_LATER
    assert life.exchange()
    assert life.first_prefills() == [lost]
    lost.move_to(RequestStatus.PREFILL)
    assert life.exchange()
    assert life.first_prefills() == [kept]


def test_exchanges_that_recompute_much_are_rationed() -> None:
    life = Rotation(num_blocks=1024)
    ration_s = RATION * (FREE_TOKENS + 1) * COSTS.prefill_token_ps / 10**12
    assert ration_s < DUE_S
    for name in "abc":
        life.running(name)
    first, second = (life.waiting(name, num_tokens=FREE_TOKENS + 1) for name in ("first", "second"))
    short = life.waiting("short", num_tokens=FREE_TOKENS)
    life.accounts.step, life.now_s = CYCLE_LATER, DUE_S_LATER
    started: list[Request] = []
    for passed_s in (0.0, 0.99 * ration_s, 1.01 * ration_s):
        life.now_s = DUE_S_LATER + passed_s
        life.exchange()
        for request in life.first_prefills():
            started.append(request)
            request.move_to(RequestStatus.PREFILL)
    assert started == [first, short, second], "few tokens are free"


def test_who_started_in_another_way_is_not_waited_for_and_goes_first_until_its_prompt_is_computed() -> None:
    life = Rotation()
    old = life.running("old")
    started, back = life.waiting("started"), life.waiting("back")
    started.move_to(RequestStatus.PREFILL)
    life.rotation.on_started(started)
    life.rotation.on_started(old)
    life.accounts.step, life.now_s = CYCLE_LATER, DUE_S_LATER
    assert life.exchange() == [old]
    assert life.first_prefills() == [started, back]
    life.account("alice").is_paused = True
    assert life.first_prefills() == []
    life.account("alice").is_paused = False
    assert life.first_prefills() == [started]
    started.move_to(RequestStatus.DECODE)
    assert life.first_prefills() == []
    life.exchange()
    assert (list(life.rotation._restarted), list(life.rotation._preempted_at_s)) == ([], [back]), "no other is kept in memory"


def test_who_was_preempted_again_waits_behind_the_others() -> None:
    life = Rotation()
    life.running("old")
    first, second = life.waiting("first"), life.waiting("second")
    life.now_s += 1.0
    life.rotation.on_preempted(first)
    life.accounts.step, life.now_s = CYCLE_LATER, DUE_S_LATER
    life.exchange()
    assert life.first_prefills() == [second]
