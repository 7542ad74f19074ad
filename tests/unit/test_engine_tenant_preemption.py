"""Preemption between tenants and classes: which request gives up its seat, for whom, and when none is preempted."""

from __future__ import annotations

import pytest

from engine.protocol import Priority
from engine.scheduling.costs import TokenCosts
from engine.scheduling.fair_policy import AGEING_STEPS, RETRY_STEPS, SCAN_ACCOUNTS_MAX, FairPolicy
from engine.scheduling.policy import Start
from engine.scheduling.preemption import TURN_STEPS
from engine.scheduling.request import Request, RequestStatus
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.tenant_rotation import CYCLE_STEPS, DUE_S
from tests.support.scheduling import BLOCK_SIZE, drain, make_request, make_scheduler, planned_tokens, step

COSTS = TokenCosts(prefill_token_ps=10, prefill_pair_ps=0, decode_token_ps=10, decode_context_ps=0)


def test_a_new_tenant_preempts_the_youngest_request_of_a_tenant_with_all_seats() -> None:
    scheduler = make_scheduler(num_blocks=1024, max_num_seqs=4, budget=64)
    for number in range(20):
        scheduler.add(make_request(f"hog {number}", 4, max_tokens=500, tenant="hog"))
    for _ in range(3):
        step(scheduler)
    scheduler.add(make_request("victim", 4, tenant="victim"))
    assert ("victim", 4) in planned_tokens(step(scheduler))
    assert scheduler.totals.preemptions == 1
    preempted = next(request for request in scheduler.waiting() if request.num_preemptions)
    assert preempted.request_id == "hog 3", "the youngest gives way"


def test_tenants_with_equal_shares_do_not_preempt_each_other() -> None:
    scheduler = make_scheduler(num_blocks=256, max_num_seqs=4, budget=64, costs=COSTS)
    for number in range(10):
        for tenant in ("alice", "bob"):
            scheduler.add(make_request(f"{tenant}{number}", 4, max_tokens=100, tenant=tenant))
    for _ in range(5):
        step(scheduler)
    assert [len(account.running) for account in scheduler.accounts] == [2, 2]
    before = scheduler.totals.preemptions
    for _ in range(100):
        step(scheduler)
    assert scheduler.totals.preemptions == before


def saturated_scheduler(num_tenants: int, max_num_seqs: int) -> Scheduler:
    """A scheduler whose tenants hold equally many seats, as far as these can be divided, and have more requests waiting."""
    scheduler = make_scheduler(num_blocks=4096, max_num_seqs=max_num_seqs, budget=64, costs=COSTS)
    for number in range(20):
        for tenant in range(num_tenants):
            scheduler.add(make_request(f"{tenant}-{number}", 4, max_tokens=1000, tenant=f"tenant-{tenant}"))
    for _ in range(20):
        step(scheduler)
    return scheduler


def test_a_seat_freed_for_a_new_tenant_is_not_taken_by_the_preempted_one() -> None:
    scheduler = saturated_scheduler(num_tenants=2, max_num_seqs=4)
    before = scheduler.totals.preemptions
    scheduler.add(make_request("charlie", 4, tenant="charlie"))
    assert ("charlie", 4) in planned_tokens(step(scheduler))
    assert scheduler.totals.preemptions == before + 1


@pytest.mark.parametrize(("priority", "answer"), [(Priority.STANDARD, Start.NO_ROOM), (Priority.BATCH, Start.NOW)])
def test_a_reserved_seat_is_given_up_if_its_request_cannot_start_or_has_a_lower_class(
    priority: Priority, answer: Start
) -> None:
    scheduler = make_scheduler()
    policy = scheduler.policy
    assert isinstance(policy, FairPolicy)
    chosen, applicant = make_request("a", 4), make_request("b", 4, tenant="bob", priority=priority)
    scheduler.add(chosen)
    scheduler.add(applicant)

    def can_start(request: Request) -> Start:
        return answer if request is applicant else Start.NOW

    policy._room_made_for = applicant
    assert policy.next_prefill(can_start) is chosen


def test_a_request_that_returns_has_no_chunk_in_a_step_that_a_restarted_prompt_fills() -> None:
    now_s = [0.0]
    scheduler = make_scheduler(num_blocks=256, max_num_seqs=2, clock=lambda: now_s[0])
    for name in ("old", "back"):
        scheduler.add(make_request(name, 4, max_tokens=500))
    for _ in range(CYCLE_STEPS + 2):
        step(scheduler)
    long = make_request("long", 64, max_tokens=50, tenant="bob")
    scheduler.add(long)
    while long.status is not RequestStatus.DECODE:
        step(scheduler)
    scheduler.preempt(long)
    scheduler.pool.release(scheduler.pool.allocate(scheduler.pool.num_available))  # nothing of it is found again
    assert planned_tokens(step(scheduler)) == [("old", 1), ("long", 15)]
    now_s[0] += DUE_S + 0.1
    assert planned_tokens(step(scheduler)) == [("long", 16)], "old has made room"


def test_a_protected_request_that_ends_is_forgotten() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 12)
    scheduler.add(request)
    step(scheduler)
    scheduler.preempt(request)
    scheduler.pool.release(scheduler.pool.allocate(scheduler.pool.num_available))  # nothing of it is found again
    step(scheduler)
    alice = scheduler.accounts.find("alice", Priority.STANDARD, 1)
    assert alice.recovering is request
    scheduler.abort(request)
    assert alice.recovering is None


def test_a_request_starts_with_its_own_prefix_although_another_was_asked_about_last() -> None:
    scheduler = make_scheduler(caches=True)
    scheduler.add(make_request("first", 8))
    drain(scheduler)
    mine, theirs = make_request("a", 8), make_request("b", 4, tenant="bob")
    for request in (mine, theirs):
        scheduler.add(request)
        assert scheduler.admission.can_start(request) is Start.NOW
    scheduler.admission.start(mine)
    assert mine.num_computed_tokens == BLOCK_SIZE


@pytest.mark.parametrize(("num_tenants", "max_num_seqs"), [(5, 16), (10, 15)])
def test_a_new_tenant_gets_a_seat_although_few_accounts_are_scanned_per_step(num_tenants: int, max_num_seqs: int) -> None:
    scheduler = saturated_scheduler(num_tenants, max_num_seqs)
    before = scheduler.totals.preemptions
    charlies = make_request("charlie", 4, tenant="charlie")
    scheduler.add(charlies)
    for _ in range(RETRY_STEPS * num_tenants // SCAN_ACCOUNTS_MAX):
        step(scheduler)
    assert charlies.first_scheduled_s is not None
    assert scheduler.totals.preemptions <= before + 3


def test_a_new_tenant_gets_a_seat_although_the_last_search_for_a_victim_failed() -> None:
    scheduler = saturated_scheduler(num_tenants=2, max_num_seqs=4)
    policy = scheduler.policy
    assert isinstance(policy, FairPolicy)
    while not policy._would_find_no_victim():
        step(scheduler)
    scheduler.add(make_request("charlie", 4, tenant="charlie"))
    assert ("charlie", 4) in planned_tokens(step(scheduler))


def test_an_interactive_request_preempts_a_batch_request_and_a_standard_one_does_not() -> None:
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=2, budget=64)
    for name in ("b1", "b2"):
        scheduler.add(make_request(name, 4, max_tokens=50, priority=Priority.BATCH))
    step(scheduler)
    scheduler.add(make_request("s", 4, priority=Priority.STANDARD))
    assert planned_tokens(step(scheduler)) == [("b1", 1), ("b2", 1)]
    scheduler.add(make_request("i", 4, priority=Priority.INTERACTIVE))
    assert planned_tokens(step(scheduler)) == [("b1", 1), ("i", 4)]


def test_a_batch_request_that_started_by_ageing_within_its_class_is_preempted_for_interactive() -> None:
    scheduler = make_scheduler(num_blocks=1024, max_num_seqs=1, budget=64)
    scheduler.add(make_request("long", 4, priority=Priority.BATCH, max_tokens=AGEING_STEPS + 50))
    waited = make_request("waited", 4, priority=Priority.BATCH, max_tokens=100)
    scheduler.add(waited)
    while waited.status is not RequestStatus.DECODE:
        step(scheduler)
    assert scheduler.accounts.step > AGEING_STEPS
    scheduler.add(make_request("i", 4, priority=Priority.INTERACTIVE))
    assert planned_tokens(step(scheduler)) == [("i", 4)]


def test_a_preempted_request_is_exchanged_with_another_of_its_tenant() -> None:
    scheduler = make_scheduler(num_blocks=1024, max_num_seqs=2, budget=64)
    requests = [make_request(str(number), 4, max_tokens=2000) for number in range(2)]
    for request in requests:
        scheduler.add(request)
    step(scheduler)
    scheduler.add(make_request("other", 4, max_tokens=2000, tenant="bob"))
    for _ in range(600):
        step(scheduler)
    assert all(request.num_preemptions for request in requests)
    assert min(request.num_output_tokens for request in requests) > 100
    assert scheduler.totals.preemptions <= 1 + 600 // TURN_STEPS, "each has had a turn before"


def test_requests_of_a_single_tenant_do_not_preempt_each_other() -> None:
    scheduler = make_scheduler(num_blocks=1024, max_num_seqs=2, budget=64)
    for number in range(6):
        scheduler.add(make_request(str(number), 4, max_tokens=2 * TURN_STEPS))
    drain(scheduler)
    assert scheduler.totals.preemptions == 0


def test_many_tenants_with_one_request_each_fill_all_seats_in_one_step() -> None:
    scheduler = make_scheduler(num_blocks=4096, max_num_seqs=64, budget=1024)
    for number in range(200):
        scheduler.add(make_request(str(number), 4, tenant=f"t{number}"))
    assert len(step(scheduler).prefills) == 64
