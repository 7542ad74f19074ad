"""Fair scheduling: accounts and service, rounds, weights, pauses, priority classes, deadlines; FCFS and VTC; KV forecast."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.protocol import FinishReason, Priority
from engine.scheduling.accounts import OUTPUT_LEN_UNKNOWN, OUTPUT_LENGTHS_KEPT, Account, Accounts, SeatCounts
from engine.scheduling.backlog import Backlog
from engine.scheduling.costs import TokenCosts
from engine.scheduling.fair_policy import AGEING_STEPS, FairPolicy
from engine.scheduling.kv_forecast import KvForecast
from engine.scheduling.policy import SKIPS_MAX, FcfsPolicy
from engine.scheduling.prefill_order import AGEING_ROUNDS
from engine.scheduling.request import Request, RequestStatus
from engine.scheduling.scheduler import Scheduler
from engine.simulator.vtc_policy import VtcPolicy
from tests.support.scheduling import drain, make_request, make_scheduler, planned_tokens, step

COSTS = TokenCosts(prefill_token_ps=10, prefill_pair_ps=0, decode_token_ps=10, decode_context_ps=0)


def account(name: str, weight: int = 1) -> Account:
    return Account(name, Priority.STANDARD, weight, COSTS)


def service_by_tenant(scheduler: Scheduler) -> dict[str, float]:
    return {tenant.tenant_id: tenant.service_s for tenant in scheduler.accounts.progress()}


def test_service_in_closed_form_equals_the_sum_over_steps() -> None:
    costs = TokenCosts(decode_token_ps=7, decode_context_ps=3)
    alice = Account("alice", Priority.STANDARD, 1, costs)
    alice.add_decode(10, step=4)
    alice.add_decode(20, step=6)
    expected = 0
    for number in range(5, 11):
        expected += costs.decode_ps(1, 10 + number - 5)
        expected += costs.decode_ps(1, 20 + number - 7) if number >= 7 else 0
    assert alice.service_at(10) == expected
    assert alice.context_at(10) == 16 + 24
    alice.remove_decode(16, step=10)
    assert (alice.num_decoding, alice.context_at(10)) == (1, 24)


def test_steps_within_a_slack_use_no_more_than_the_slack() -> None:
    alice = Account("alice", Priority.STANDARD, 1, TokenCosts(decode_token_ps=7, decode_context_ps=3))
    for context in (3, 50, 1000):
        alice.add_decode(context, step=0)
    for slack in (1, 500, 10_000, 1_000_000):
        steps = alice.steps_within(slack, step=0)
        assert steps == 1 or (steps > 1 and alice.service_at(steps) <= slack)
    assert alice.service_at(steps * 5 // 4) > slack, "checked far too often"


def test_a_slack_shorter_than_a_step_allows_one_step() -> None:
    alice = account("alice")
    alice.add_decode(5, step=0)
    assert alice.steps_within(1, step=0) == 1


def test_output_length_is_predicted_as_the_longest_of_recent_answers() -> None:
    alice = account("alice")
    assert alice.predicted_output_len() == OUTPUT_LEN_UNKNOWN
    for num_tokens in (900, 10, 30, 20):
        alice.record_output(num_tokens)
    assert alice.predicted_output_len() == 900
    for _ in range(OUTPUT_LENGTHS_KEPT):
        alice.record_output(5)
    assert alice.predicted_output_len() == 5


def request_of(account: Account) -> Request:
    request = make_request("a", 1)
    request.account = account
    return request


def test_a_class_is_below_every_higher_class_with_requests() -> None:
    accounts = Accounts(COSTS)
    assert not any(accounts.has_requests_above(priority) for priority in Priority)
    for priority, is_below in ((Priority.BATCH, [False, False, False]), (Priority.STANDARD, [False, False, True])):
        accounts.add_waiting(request_of(accounts.find("alice", priority, 1)), first=False)
        assert [accounts.has_requests_above(each) for each in Priority] == is_below


def test_an_account_with_new_requests_is_not_evicted_as_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.scheduling.accounts.IDLE_ACCOUNTS_MAX", 1)
    accounts = Accounts(COSTS)
    alice, bob = (accounts.find(name, Priority.STANDARD, 1) for name in ("alice", "bob"))
    of_alice, of_bob = request_of(alice), request_of(bob)
    for request in (of_alice, of_bob):
        accounts.add_waiting(request, first=False)
    accounts.remove_waiting(of_alice)
    accounts.add_waiting(of_alice, first=False)
    accounts.remove_waiting(of_bob)
    assert list(accounts) == [alice, bob]
    accounts.remove_waiting(of_alice)
    assert list(accounts) == [alice], "the one that has had no requests for longest is forgotten"


def test_an_idle_account_gains_one_quantum_at_most_and_debt_beyond_the_cap_is_dropped() -> None:
    backlog = Backlog(quantum_ps=100, cap_ps=400)
    busy, idle, late = account("busy"), account("idle", 2), account("late", 2)
    backlog.join(busy, 0)
    busy.charge(5000)
    assert backlog.next_accounts(1, 0) == [busy]
    backlog.join(idle, 0)
    assert backlog.lead_at(idle, 0) == -200
    late.charge(9_999_999)
    backlog.join(late, 0)
    assert backlog.lead_at(late, 0) == 800


def test_leaving_and_rejoining_at_once_keeps_the_lead() -> None:
    backlog = Backlog(quantum_ps=100, cap_ps=400)
    alice = account("alice")
    backlog.join(alice, 0)
    alice.charge(130)
    before = backlog.lead_at(alice, 0)
    backlog.leave(alice)
    backlog.join(alice, 0)
    assert backlog.lead_at(alice, 0) == before


def test_the_level_rises_until_an_account_is_entitled() -> None:
    backlog = Backlog(quantum_ps=100, cap_ps=10_000)
    light, heavy = account("light"), account("heavy", 4)
    for each in (light, heavy):
        backlog.join(each, 0)
    light.charge(950)
    heavy.charge(950)
    assert backlog.next_accounts(8, 0) == [heavy, light]
    assert backlog.is_eligible(heavy, 0)
    assert not backlog.is_eligible(light, 0)
    heavy.charge(100_000)
    assert backlog.next_accounts(8, 0) == [light, heavy]
    assert (backlog.is_eligible(light, 0), backlog.lead_at(light, 0)) == (True, -50)


def test_largest_holder_is_the_account_with_most_seats_per_weight() -> None:
    seats = SeatCounts()
    light, heavy = account("light"), account("heavy", 4)
    for number, each in ((2, light), (7, heavy)):
        for before in range(number):
            each.running[make_request(f"{before}", 1)] = None
            seats.move(each, before, before + 1)
    assert seats.largest_holder() is light
    for before in (2, 1):
        light.running.popitem()
        seats.move(light, before, before - 1)
    assert seats.largest_holder() is heavy


@pytest.mark.parametrize("weights", [(1, 1), (1, 4)], ids=str)
def test_two_tenants_with_a_backlog_receive_service_by_weight(weights: tuple[int, int]) -> None:
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=8, budget=16, costs=COSTS)
    for number in range(400):
        for tenant, weight in zip(("alice", "bob"), weights, strict=True):
            scheduler.add(make_request(f"{tenant}{number}", 8, tenant=tenant, weight=weight, arrived_s=float(number)))
    for _ in range(300):
        step(scheduler)
    served = service_by_tenant(scheduler)
    assert served["alice"] * weights[1] == pytest.approx(served["bob"] * weights[0], rel=0.1)


def test_a_single_tenant_may_use_all_seats() -> None:
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=4, budget=64)
    for number in range(6):
        scheduler.add(make_request(str(number), 4))
    assert len(step(scheduler).items) == 4


def test_a_tenant_far_ahead_is_paused_until_the_level_has_caught_up() -> None:
    scheduler = make_scheduler(num_blocks=4096, max_num_seqs=8, budget=64)
    for number in range(10):
        scheduler.add(make_request(f"heavy {number}", 4, max_tokens=900, tenant="heavy"))
        scheduler.add(make_request(f"light {number}", 4, max_tokens=900, tenant="light"))
    for _ in range(8):
        step(scheduler)
    policy = scheduler.policy
    assert isinstance(policy, FairPolicy)
    heavy = scheduler.accounts.find("heavy", Priority.STANDARD, 1)
    scheduler.accounts.charge(heavy, 2 * policy.settings.cap_ps)
    policy.on_charged(heavy)
    assert {item.request.tenant_id for item in step(scheduler).decodes} == {"light"}
    light = scheduler.accounts.find("light", Priority.STANDARD, 1)
    scheduler.accounts.charge(light, 2 * policy.settings.cap_ps)
    policy.on_charged(light)
    assert "heavy" in {item.request.tenant_id for item in step(scheduler).decodes}


def test_higher_classes_start_first() -> None:
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=2, budget=64)
    for name, priority in (("b", Priority.BATCH), ("s", Priority.STANDARD), ("i", Priority.INTERACTIVE)):
        scheduler.add(make_request(name, 4, priority=priority, max_tokens=1))
    assert planned_tokens(step(scheduler)) == [("i", 4), ("s", 4)]
    assert planned_tokens(step(scheduler)) == [("b", 4)]


def test_a_class_that_waited_for_the_ageing_time_starts_a_request() -> None:
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=2, budget=64)
    low = make_request("low", 4, priority=Priority.BATCH, max_tokens=3)
    scheduler.add(low)
    for number in range(4 * AGEING_STEPS):
        while scheduler.num_waiting < 4:
            scheduler.add(make_request(f"i{number}", 4, priority=Priority.INTERACTIVE, max_tokens=2))
        step(scheduler)
        if low.is_finished:
            break
    assert AGEING_STEPS < scheduler.accounts.step < AGEING_STEPS + 20


def keep_interactive_waiting(scheduler: Scheduler, steps: int) -> None:
    for _ in range(steps):
        while scheduler.num_waiting < 4:
            name = f"i{scheduler.accounts.step} {scheduler.num_waiting}"
            scheduler.add(make_request(name, 4, priority=Priority.INTERACTIVE, max_tokens=2))
        step(scheduler)


def test_each_ageing_time_starts_one_request_of_the_waiting_class() -> None:
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=2, budget=64)
    low = [make_request(f"low {number}", 4, priority=Priority.BATCH, max_tokens=3) for number in range(2)]
    for request in low:
        scheduler.add(request)
    keep_interactive_waiting(scheduler, AGEING_STEPS + 20)
    assert [request.is_finished for request in low] == [True, False]
    keep_interactive_waiting(scheduler, AGEING_STEPS // 2)
    assert low[1].first_scheduled_s is None
    keep_interactive_waiting(scheduler, AGEING_STEPS // 2)
    assert low[1].is_finished


def test_time_without_waiting_requests_does_not_count_as_waiting() -> None:
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=2, budget=64)
    scheduler.add(make_request("first", 4, priority=Priority.BATCH, max_tokens=3))
    drain(scheduler)
    keep_interactive_waiting(scheduler, AGEING_STEPS + 20)
    low = make_request("second", 4, priority=Priority.BATCH, max_tokens=3)
    scheduler.add(low)
    keep_interactive_waiting(scheduler, AGEING_STEPS - 20)
    assert low.first_scheduled_s is None


def test_prompts_of_a_paused_tenant_are_not_computed_even_if_the_step_has_room() -> None:
    scheduler = make_scheduler(num_blocks=4096, max_num_seqs=8, budget=64)
    scheduler.add(make_request("light", 400, max_tokens=900, tenant="light", first_token=5000))
    scheduler.add(make_request("heavy", 4000, tenant="heavy"))
    for _ in range(16):
        step(scheduler)
    policy = scheduler.policy
    assert isinstance(policy, FairPolicy)
    heavy = scheduler.accounts.find("heavy", Priority.STANDARD, 1)
    assert heavy.prefilling
    scheduler.add(make_request("0", 4, max_tokens=1, tenant="light"))
    step(scheduler)
    scheduler.accounts.charge(heavy, 3 * policy.settings.cap_ps)
    for number in range(1, 6):
        scheduler.add(make_request(str(number), 4, max_tokens=1, tenant="light"))
        policy.on_charged(heavy)
        batch = step(scheduler)
        assert {item.request.tenant_id for item in batch.items} == {"light"}
        assert batch.num_tokens < 20


def test_a_request_with_the_maximum_of_skips_is_not_passed_by_another_tenant() -> None:
    scheduler = make_scheduler(num_blocks=32, max_num_seqs=8)
    scheduler.add(make_request("holder", 16, max_tokens=100, tenant="bob"))
    step(scheduler)
    big = make_request("big", 120)
    scheduler.add(big)
    for number in range(SKIPS_MAX):
        scheduler.add(make_request(f"small {number}", 1, max_tokens=1))
    while big.num_skips < SKIPS_MAX:
        step(scheduler)
    small = make_request("small", 1, max_tokens=1, tenant="bob")
    scheduler.add(small)
    while big.status is RequestStatus.QUEUED:
        assert small.first_scheduled_s is None
        step(scheduler)


def test_a_request_still_queued_at_its_deadline_ends_without_a_token() -> None:
    now = [0.0]
    scheduler = make_scheduler(max_num_seqs=1, clock=lambda: now[0])
    holder, late, patient = (
        make_request("holder", 4, queue_deadline_s=5.0),
        make_request("late", 4, queue_deadline_s=5.0),
        make_request("patient", 4),
    )
    for request in (holder, late, patient):
        scheduler.add(request)
    step(scheduler)
    assert scheduler.expire() == []
    now[0] = 5.0
    (event,) = scheduler.expire()
    assert (event.request_id, event.finish_reason, event.num_output_tokens) == ("late", FinishReason.DEADLINE, 0)
    drain(scheduler)
    assert holder.finish_reason is FinishReason.LENGTH, "one that was scheduled in time is left alone"
    assert patient.finish_reason is FinishReason.LENGTH


def test_among_entitled_requests_the_longest_cached_prefix_starts_first() -> None:
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=1, budget=64, caches=True)
    scheduler.add(make_request("warm", 12, max_tokens=1))
    step(scheduler)
    scheduler.add(make_request("cold", 12, first_token=500, max_tokens=1))
    scheduler.add(make_request("hit", 12, max_tokens=1, arrived_s=1.0))
    assert planned_tokens(step(scheduler)) == [("hit", 4)]


def test_cached_prefixes_pass_the_oldest_request_of_a_tenant_for_a_bounded_time() -> None:
    scheduler = make_scheduler(num_blocks=256, max_num_seqs=1, budget=64, caches=True, costs=COSTS)
    scheduler.add(make_request("warm", 12, max_tokens=1))
    step(scheduler)
    cold = make_request("cold", 12, first_token=500, max_tokens=1)
    scheduler.add(cold)
    num_passed = 0
    while cold.first_scheduled_s is None:
        scheduler.add(make_request("hit", 12, max_tokens=300, arrived_s=1.0))
        num_passed += step(scheduler).prefills[0].request is not cold
        while scheduler.num_running:
            step(scheduler)
        assert num_passed <= 2 * (AGEING_ROUNDS + 1), "each costs more than half a round"
    assert num_passed > 2


def test_preempting_an_old_request_keeps_the_current_weight_of_the_tenant() -> None:
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=2, budget=64)
    old = make_request("old", 4, weight=1)
    scheduler.add(old)
    step(scheduler)
    scheduler.add(make_request("new", 4, weight=3))
    scheduler.preempt(old)
    assert scheduler.accounts.find("alice", Priority.STANDARD, 1).weight == 3
    drain(scheduler)


def test_a_changed_weight_scales_the_lead_of_the_account() -> None:
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=2, budget=64, costs=COSTS)
    for number in range(4):
        scheduler.add(make_request(f"a{number}", 4))
        scheduler.add(make_request(f"b{number}", 4, tenant="bob"))
    step(scheduler)
    policy = scheduler.policy
    assert isinstance(policy, FairPolicy)
    alice, backlog = scheduler.accounts.find("alice", Priority.STANDARD, 1), policy.backlogs[Priority.STANDARD]
    before = backlog.lead_at(alice, scheduler.accounts.step)
    scheduler.add(make_request("heavier", 4, weight=3))
    scheduler.check_invariants()
    assert alice.weight == 3
    assert backlog.lead_at(alice, scheduler.accounts.step) == 3 * before
    drain(scheduler)


def test_a_tenant_whose_weight_was_lowered_loses_its_seat_once_it_is_ahead() -> None:
    costs = TokenCosts(prefill_token_ps=100, prefill_pair_ps=0, decode_token_ps=4000, decode_context_ps=0)
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=1, costs=costs)
    policy = scheduler.policy
    assert isinstance(policy, FairPolicy)
    scheduler.add(make_request("runs", 4, max_tokens=200, weight=1000))
    step(scheduler)
    scheduler.add(make_request("waits", 4, weight=1000))
    bob = make_request("bob", 4, tenant="bob")
    scheduler.add(bob)
    step(scheduler)
    scheduler.add(make_request("light", 4))
    alice = scheduler.accounts.find("alice", Priority.STANDARD, 1)
    while policy._leads.lead_of(alice) <= policy.settings.hysteresis_ps:
        assert bob.first_scheduled_s is None
        step(scheduler)
    step(scheduler)
    assert bob.first_scheduled_s is not None


@pytest.mark.parametrize("policy", [FcfsPolicy, VtcPolicy])
def test_fcfs_and_vtc_serve_all_requests(policy: type[FcfsPolicy | VtcPolicy]) -> None:
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=3, budget=16, policy=policy, costs=VtcPolicy.TOKEN_PRICES)
    requests = [make_request(str(number), 1 + number % 9, tenant=f"t{number % 4}") for number in range(30)]
    for request in requests:
        scheduler.add(request)
    drain(scheduler)
    assert all(request.is_finished for request in requests)


def test_a_late_tenant_waits_behind_a_flood_under_fcfs_but_not_under_vtc() -> None:
    first_steps: dict[str, int] = Counter()
    for name, policy in (("fcfs", FcfsPolicy), ("vtc", VtcPolicy)):
        scheduler = make_scheduler(num_blocks=64, max_num_seqs=2, budget=16, policy=policy, costs=VtcPolicy.TOKEN_PRICES)
        for number in range(20):
            scheduler.add(make_request(f"flood {number}", 4, tenant="hog", max_tokens=2))
        late = make_request("late", 4, tenant="victim", max_tokens=2)
        scheduler.add(late)
        while late.status is RequestStatus.QUEUED:
            step(scheduler)
            first_steps[name] += 1
    assert first_steps["vtc"] <= 3 < 15 < first_steps["fcfs"]


def test_the_kv_forecast_finds_the_peak_of_predicted_blocks() -> None:
    forecast = KvForecast(capacity=400, block_size=1)
    short, long = make_request("short", 1), make_request("long", 1)
    forecast.add(short, 0, 100, 32)
    forecast.add(long, 0, 100, 96)
    assert forecast.fits(0, 100, 20), "the short one is gone before the long one has grown"
    assert not forecast.fits(0, 150, 96)
    forecast.remove(short)
    assert forecast.fits(0, 150, 50)
    forecast.check_invariants([long], 127)
    assert forecast.overdue(128) == [long]
    forecast.renew(long, 128, 64)
    assert forecast.overdue(128) == []
    forecast.check_invariants([long], 128)
