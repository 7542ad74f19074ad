"""The admission queue: a request refused by a limit may wait briefly for room; in order, all or nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from appliance.base.errors import BudgetExceeded, RateLimitExceeded, RequestExceedsLimit
from appliance.metering.limits import queue as admission_queue
from appliance.metering.limits.allowances import Ahead
from appliance.metering.limits.limit_waits import LimitWait
from appliance.metering.limits.waiter_queue import WaiterQueue
from appliance.tenancy.model_policies import ModelPolicy
from appliance.tenancy.principals import Limits, Principal
from tests.support.case_ids import case_id
from tests.support.clock import START, FakeClock
from tests.support.factories import adjustment, price, principal
from tests.support.ledgers import num_running, num_waiting
from tests.support.waiting_requests import Queue, Waits, limited


@pytest.fixture
async def queue(clock: FakeClock) -> AsyncIterator[Queue]:
    opened = Queue(clock)
    yield opened
    await opened.close()


def with_key(who: Principal, key_id: str, limits: Limits | None = None) -> Principal:
    """Return another key of the same tenant."""
    return dataclasses.replace(who, key=dataclasses.replace(who.key, id=key_id, limits=limits or Limits()))


async def test_a_request_waits_exactly_until_the_bucket_has_room(queue: Queue) -> None:
    bob = principal(Limits(tokens_per_minute=60))
    (await queue.submit(bob, 60)).result().settle(60)
    waiting = await queue.submit(bob, 30)
    await queue.timer.advance(29.999)
    assert not waiting.done()
    await queue.timer.advance(0.001)
    assert waiting.done()
    waiting.result().settle(30)


async def test_a_wait_below_a_second_is_not_rounded_up(queue: Queue) -> None:
    bob = principal(Limits(tokens_per_minute=600))
    (await queue.submit(bob, 600)).result().settle(600)
    waiting = await queue.submit(bob, 2)
    await queue.timer.advance(0.199)
    assert not waiting.done()
    await queue.timer.advance(0.001)
    assert waiting.done()


async def test_a_failed_retry_shortly_before_the_deadline_does_not_refuse_the_waiter(queue: Queue) -> None:
    bob = principal(Limits(tokens_per_minute=60))
    (await queue.submit(bob, 60)).result().settle(60)
    waiting = await queue.submit(bob, 30, wait_s=30.0)
    await queue.timer.advance(29.5)
    queue.admission.reconfigure(limited(bob, Limits(tokens_per_minute=60)), {})
    await queue.timer.advance(0.5)
    assert waiting.result()


async def test_a_waiter_has_one_retry_timer_and_none_after_it_has_left(queue: Queue) -> None:
    bob = principal(Limits(tokens_per_minute=60))
    (await queue.submit(bob, 60)).result().settle(60)
    waiting = await queue.submit(bob, 30)
    for _ in range(3):
        await queue.timer.advance(1.0)
        queue.admission.reconfigure(limited(bob, Limits(tokens_per_minute=60)), {})
        await queue.timer.settle()
        assert queue.num_scheduled_retries() == 1
    waiting.cancel()
    await queue.timer.settle()
    assert queue.num_scheduled_retries() == 0


async def test_a_request_blocked_only_by_running_requests_waits_however_short_its_patience(queue: Queue) -> None:
    bob = principal(Limits(concurrent_requests=1))
    running = await queue.submit(bob, 1)
    waiting, impatient = await queue.submit(bob, 1, wait_s=0.5), await queue.submit(bob, 1, wait_s=0.25)
    await queue.timer.advance(0.249)
    assert (waiting.done(), impatient.done()) == (False, False)
    await queue.timer.advance(0.001)
    assert isinstance(impatient.exception(), RateLimitExceeded)
    running.result().settle(1)
    await queue.timer.settle()
    assert waiting.result()


async def test_a_request_that_never_fits_one_limit_does_not_wait_for_another(queue: Queue) -> None:
    bob = with_key(principal(Limits(tokens_per_minute=60)), "small", Limits(tokens_per_minute=20))
    await queue.submit(bob, 20)
    assert isinstance((await queue.submit(bob, 50)).exception(), RequestExceedsLimit)


async def test_a_call_scheduled_on_the_event_loop_can_be_cancelled() -> None:
    called: list[str] = []
    alarm = admission_queue.call_on_loop(0.0, lambda: called.append("cancelled"))
    admission_queue.call_on_loop(0.0, lambda: called.append("kept"))
    alarm.cancel()
    await asyncio.sleep(0.001)
    assert called == ["kept"]


async def test_without_enough_patience_a_request_is_refused_at_once(queue: Queue) -> None:
    bob = principal(Limits(tokens_per_minute=60))
    await queue.submit(bob, 60)
    for wait_s in (0.0, 29.999):
        refused = await queue.submit(bob, 30, wait_s=wait_s)
        assert isinstance(refused.exception(), RateLimitExceeded)
    assert not (await queue.submit(bob, 30, wait_s=30.0)).done()


async def test_without_patience_a_request_does_not_wait_for_running_ones(queue: Queue) -> None:
    bob = principal(Limits(concurrent_requests=1))
    await queue.submit(bob, 1)
    assert isinstance((await queue.submit(bob, 1, wait_s=0.0)).exception(), RateLimitExceeded)


@pytest.mark.parametrize(
    ("limits", "error"),
    [(Limits(tokens_per_minute=10), RequestExceedsLimit), (Limits(concurrent_requests=0), RequestExceedsLimit)],
    ids=case_id,
)
async def test_a_request_that_never_fits_does_not_wait(queue: Queue, limits: Limits, error: type[Exception]) -> None:
    assert isinstance((await queue.submit(principal(limits), 11)).exception(), error)


async def test_a_request_waits_for_a_reserved_budget_but_not_for_a_spent_one(queue: Queue) -> None:
    bob, cost = principal(Limits(monthly_budget=100)), price(prompt=1_000_000, cached=0, completion=1_000_000)
    first = await queue.submit(bob, 60, price=cost)
    waiting = await queue.submit(bob, 60, price=cost)
    assert not waiting.done()
    first.result().settle(40)
    await queue.timer.settle()
    waiting.result().settle(60)
    assert isinstance((await queue.submit(bob, 1, price=cost)).exception(), BudgetExceeded)


async def test_a_smaller_later_request_does_not_overtake(queue: Queue) -> None:
    bob = principal(Limits(tokens_per_minute=60))
    (await queue.submit(bob, 50)).result().settle(50)
    large = await queue.submit(bob, 60)
    small = await queue.submit(bob, 5)
    impatient = await queue.submit(bob, 5, wait_s=0.0)
    assert not large.done()
    assert not small.done()
    assert impatient.exception().retry_after_s == 60.0  # type: ignore[union-attr]  # 50 for the large, 5 for the small, and its own 5
    await queue.timer.advance(50.0)
    assert large.done()
    assert not small.done()
    await queue.timer.advance(5.0)
    assert small.done()


async def test_a_stream_of_small_requests_does_not_starve_a_large_one(queue: Queue) -> None:
    bob = principal(Limits(tokens_per_minute=60))
    (await queue.submit(bob, 60)).result().settle(60)
    large = await queue.submit(bob, 60)
    for _ in range(59):
        await queue.submit(bob, 1, wait_s=1.0)
        await queue.timer.advance(1.0)
    assert not large.done()
    await queue.timer.advance(1.0)
    assert large.done()


async def test_a_key_waiting_for_its_own_limit_does_not_block_other_keys_of_its_tenant(queue: Queue) -> None:
    bob = principal(Limits(tokens_per_minute=600))
    slow, quick = with_key(bob, "slow", Limits(tokens_per_minute=60)), with_key(bob, "quick")
    await queue.submit(slow, 60)
    waiting = await queue.submit(slow, 30)
    assert (await queue.submit(quick, 100)).done()
    assert not waiting.done()


async def test_a_request_waiting_for_its_key_keeps_its_room_at_the_tenant(queue: Queue) -> None:
    bob = principal(Limits(tokens_per_minute=60))
    slow, quick = with_key(bob, "slow", Limits(tokens_per_minute=60)), with_key(bob, "quick")
    await queue.submit(slow, 60)
    waiting = await queue.submit(slow, 30)  # of tenant and key
    later = await queue.submit(quick, 30)
    await queue.timer.advance(30.0)
    assert (waiting.done(), later.done()) == (True, False)
    await queue.timer.advance(30.0)
    assert later.done()


async def test_a_waiter_keeps_its_place_at_the_tenant_while_only_the_key_refuses(queue: Queue) -> None:
    bob = principal(Limits(tokens_per_minute=60))
    slow, quick = with_key(bob, "slow", Limits(concurrent_requests=1)), with_key(bob, "quick")
    running = await queue.submit(slow, 60)
    waiting = await queue.submit(slow, 30)  # of tenant and key
    await queue.timer.advance(30.0)
    later = await queue.submit(quick, 30)
    assert (waiting.done(), later.done()) == (False, False)
    await queue.timer.advance(10.0)
    running.result().settle(60)
    await queue.timer.settle()
    assert (waiting.done(), later.done()) == (True, False)
    await queue.timer.advance(20.0)
    assert later.done()


async def test_a_request_refused_by_tenant_and_key_is_in_both_queues(queue: Queue) -> None:
    for number in range(8):  # in a set, either may come first
        bob = principal(Limits(tokens_per_minute=60))
        slow = with_key(bob, f"slow {number}", Limits(tokens_per_minute=60))
        (await queue.submit(slow, 30)).result().settle(30)
        await queue.submit(slow, 40)
        assert await queue.refusing_limits(slow, 1) == {("tenant", "tokens"), ("key", "tokens")}


async def test_a_request_that_its_model_no_longer_refuses_leaves_the_queue_of_the_model(queue: Queue) -> None:
    policy = ModelPolicy(model="demo", limits=Limits(tokens_per_minute=600), limit_mode="enforce", updated_at=START)
    bob, charlie = principal(Limits(concurrent_requests=1)), principal()
    await queue.submit(bob, 100, policy=policy)
    (await queue.submit(charlie, 500, policy=policy)).result().settle(500)
    waiting = await queue.submit(bob, 100, policy=policy)  # of tenant and model
    await queue.timer.advance(9.0)
    behind = await queue.submit(charlie, 10, policy=policy)
    await queue.timer.advance(0.999)
    assert not behind.done(), "the room of the model is kept for those who came before"
    await queue.timer.advance(0.001)
    assert (waiting.done(), behind.done()) == (False, True)
    assert await queue.refusing_limits(charlie, 90, policy=policy) == set()


async def test_leaving_the_queue_of_a_model_wakes_those_behind(queue: Queue) -> None:
    shared = ModelPolicy(model="demo", limits=Limits(tokens_per_minute=60), limit_mode="enforce", updated_at=START)
    alice, bob = principal(Limits(tokens_per_minute=60)), principal()
    (await queue.submit(bob, 60, policy=shared)).result().settle(60)
    other = (await queue.submit(alice, 0, model="other")).result()
    (await queue.submit(alice, 60, model="other")).result().settle(90)
    await queue.submit(alice, 10, policy=shared)  # 40 s until its tenant has room, 10 s until the model has
    behind = await queue.submit(bob, 10, policy=shared)
    await queue.timer.advance(12.0)
    assert not behind.done()
    other.settle(0)
    await queue.timer.settle()
    assert behind.result()


async def test_a_daily_limit_is_kept_free_only_for_waiters_that_need_it(queue: Queue) -> None:
    bob = principal(Limits(concurrent_requests=2, tokens_per_day=1000))
    slow, quick = with_key(bob, "slow", Limits(tokens_per_day=100)), with_key(bob, "quick")
    await queue.submit(slow, 60)
    await queue.submit(quick, 1)
    assert not (await queue.submit(slow, 60)).done()  # for a place at the tenant and for tokens of the key's day
    assert await queue.refusing_limits(quick, 10) == {("tenant", "concurrency")}
    assert await queue.refusing_limits(slow, 10) == {("tenant", "concurrency"), ("key", "tokens_per_day")}


@pytest.mark.parametrize(
    ("limits", "days"), [(Limits(tokens_per_day=100), 0.5), (Limits(monthly_budget=100), 9.5)], ids=["day", "month"]
)
async def test_a_request_held_up_by_running_ones_is_admitted_when_a_new_day_or_month_begins(
    queue: Queue, limits: Limits, days: float
) -> None:
    bob, cost = principal(limits), price(prompt=10**6, cached=10**6)  # a micro-unit a token
    await queue.timer.advance(days * 86_400 - 10.0)
    await queue.submit(bob, 60, price=cost)
    waiting = await queue.submit(bob, 60, price=cost)
    await queue.timer.advance(9.999)
    assert not waiting.done()
    await queue.timer.advance(0.001)
    assert waiting.done()


async def test_a_tenant_waiting_for_its_own_limit_does_not_block_others_at_the_model(queue: Queue) -> None:
    policy = ModelPolicy(model="demo", limits=Limits(tokens_per_minute=600), limit_mode="enforce", updated_at=START)
    bob, charlie = principal(Limits(tokens_per_minute=60)), principal()
    await queue.submit(bob, 60, policy=policy)
    waiting = await queue.submit(bob, 60, policy=policy)
    for _ in range(5):
        assert (await queue.submit(charlie, 100, policy=policy)).done()
    assert not waiting.done()


async def test_tenants_queue_at_a_model_in_order_of_arrival(queue: Queue) -> None:
    policy = ModelPolicy(model="demo", limits=Limits(tokens_per_minute=60), limit_mode="enforce", updated_at=START)
    bob, charlie = principal(), principal()
    await queue.submit(bob, 60, policy=policy)
    first, second = await queue.submit(bob, 40, policy=policy), await queue.submit(charlie, 10, policy=policy)
    await queue.timer.advance(40.0)
    assert (first.done(), second.done()) == (True, False)
    await queue.timer.advance(10.0)
    assert second.done()


async def test_a_timed_out_waiter_is_refused_with_the_remaining_wait(queue: Queue) -> None:
    bob = principal(Limits(concurrent_requests=1, tokens_per_minute=600))
    running = await queue.submit(bob, 10)
    waiting, behind = await queue.submit(bob, 10, wait_s=5.0), await queue.submit(bob, 10, wait_s=10.0)
    await queue.timer.advance(4.999)
    assert not waiting.done()
    await queue.timer.advance(0.001)
    error = waiting.exception()
    assert isinstance(error, RateLimitExceeded)
    assert error.retry_after_s == 1.0
    running.result().settle(10)
    await queue.timer.settle()
    assert behind.done()


async def test_the_end_of_a_request_admits_the_next_at_once(queue: Queue) -> None:
    bob = principal(Limits(concurrent_requests=2))
    running = [await queue.submit(bob, 1) for _ in range(2)]
    waiting = [await queue.submit(bob, 1) for _ in range(3)]
    assert not any(task.done() for task in waiting)
    running[0].result().void()
    await queue.timer.settle()
    assert [task.done() for task in waiting] == [True, False, False]
    running[1].result().settle(1)
    waiting[0].result().settle(1)
    await queue.timer.settle()
    assert all(task.done() for task in waiting)


async def test_a_cancelled_waiter_takes_nothing_and_wakes_those_behind(queue: Queue) -> None:
    bob = principal(Limits(tokens_per_minute=60))
    (await queue.submit(bob, 50)).result().settle(50)
    large = await queue.submit(bob, 60)
    patient = await queue.submit(bob, 5)
    assert not patient.done()
    large.cancel()
    await queue.timer.settle()
    assert large.cancelled()
    assert patient.done()
    assert num_running(queue.admission, bob.tenant.id) == 2 - 1


async def test_a_request_cancelled_while_being_admitted_gives_everything_back(queue: Queue) -> None:
    bob = principal(Limits(concurrent_requests=1))
    running, waiting = await queue.submit(bob, 1), await queue.submit(bob, 1)
    running.result().settle(1)  # admits the waiting request, whose task has not resumed yet
    waiting.cancel()
    await queue.timer.settle()
    assert waiting.cancelled()
    assert num_running(queue.admission, bob.tenant.id) == 0


async def test_a_lowered_limit_cuts_the_expected_output_of_a_waiting_request_as_that_of_a_new_one(queue: Queue) -> None:
    bob = principal(Limits(tokens_per_minute=400))
    await queue.submit(bob, 100)
    waiting = await queue.submit(bob, 100, max_output_tokens=None, output_room=1000)  # needs 356 of the 300 left
    queue.admission.reconfigure(limited(bob, Limits(tokens_per_minute=300)), {})
    await queue.timer.advance(20.0)
    assert waiting.result().reserved_tokens == 300


async def test_a_request_cancelled_while_being_refused_is_cancelled(queue: Queue) -> None:
    bob = principal(Limits(concurrent_requests=1))
    await queue.submit(bob, 1)
    waiting = await queue.submit(bob, 1)
    queue.admission.reconfigure(limited(bob, Limits(concurrent_requests=0)), {})
    while num_waiting(queue.admission):  # noqa: ASYNC110 - each turn of the event loop counts
        await asyncio.sleep(0)
    waiting.cancel()
    await queue.timer.settle()
    assert waiting.cancelled()


async def test_the_observer_gets_the_duration_and_outcome_of_each_wait(clock: FakeClock) -> None:
    waits, bob = Waits(), principal(Limits(concurrent_requests=1))
    queue = Queue(clock, waits=waits)
    running = await queue.submit(bob, 1)
    assert waits.records == [], "the first request did not wait"
    clock.advance(100.0)

    admitted = await queue.submit(bob, 1, wait_s=60.0)
    assert waits.records == []
    await queue.timer.advance(2.0)
    running.result().settle(1)
    await queue.timer.settle()
    refused = await queue.submit(bob, 1, wait_s=5.0)
    await queue.timer.advance(5.0)
    cancelled = await queue.submit(bob, 1)
    await queue.timer.advance(1.0)
    cancelled.cancel()
    await queue.timer.settle()

    assert admitted.result()
    assert isinstance(refused.exception(), RateLimitExceeded)
    assert cancelled.cancelled()
    assert waits.records == [("admitted", "demo", 2.0), ("refused", "demo", 5.0), ("abandoned", "demo", 1.0)]
    await queue.close()


async def test_a_wait_says_how_long_it_was_and_for_which_limit(queue: Queue, clock: FakeClock) -> None:
    bob = principal(Limits(tokens_per_minute=60))
    waits = LimitWait(), LimitWait()
    first, second = [await queue.submit(bob, tokens, wait=wait) for tokens, wait in zip((60, 30), waits, strict=True)]
    await queue.timer.advance(20.0)
    assert (waits[1].total_s(clock.monotonic_s()), waits[1].held_up_by) == (20.0, "tenant_tokens")
    await queue.timer.advance(10.0)
    found = [(wait.total_s(clock.monotonic_s()), wait.held_up_by, wait.awaited_limit) for wait in waits]
    assert found == [(0.0, None, None), (30.0, None, "tenant_tokens")]
    for admitted in (first, second):
        admitted.result().settle(1)


async def test_each_part_of_a_wait_counts_for_the_limit_that_refused_meanwhile(queue: Queue) -> None:
    bob = principal(Limits(tokens_per_minute=60, concurrent_requests=2))
    running = await queue.submit(bob, 60)
    wait = LimitWait()
    waiting = await queue.submit(bob, 1, wait=wait)
    await queue.timer.advance(0.5)
    queue.admission.reconfigure(limited(bob, Limits(tokens_per_minute=60, concurrent_requests=1)), {})
    await queue.timer.settle()
    await queue.timer.advance(4.5)
    running.result().settle(60)
    await queue.timer.settle()
    assert wait.waited_s == {"tenant_tokens": 0.5, "tenant_concurrency": 4.5}
    assert wait.awaited_limit == "tenant_concurrency"
    waiting.result().settle(1)


async def test_an_idle_queue_does_not_use_the_event_loop(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    bob = principal(Limits(concurrent_requests=1))
    tries: list[str] = []
    await queue.submit(bob, 1)
    waiting = await queue.submit(bob, 1)
    try_some = queue.admission._queue._try_some

    def counted() -> None:
        tries.append("in a turn")
        try_some()

    monkeypatch.setattr(queue.admission._queue, "_try_some", counted)
    queue.admission.reconfigure({}, {})
    (await queue.submit(principal(), 1)).result().settle(1)
    await queue.timer.settle()
    assert tries == [], "nothing was woken"
    for _ in range(2):
        queue.admission.reconfigure(limited(bob, Limits(concurrent_requests=1)), {})
    await queue.timer.settle()
    assert len(tries) == 1, "a queue woken twice in a turn is retried once"
    assert not waiting.done()


async def test_a_queue_is_bounded(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_queue, "WAITERS_PER_QUEUE_MAX", 2)
    bob = principal(Limits(concurrent_requests=1))
    await queue.submit(bob, 1)
    waiting = [await queue.submit(bob, 1) for _ in range(3)]
    assert [task.done() for task in waiting] == [False, False, True]
    assert isinstance(waiting[2].exception(), RateLimitExceeded)


async def test_a_tenant_with_many_keys_that_fills_all_places_does_not_keep_others_from_waiting(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_queue, "WAITERS_MAX", 6)
    one = Limits(concurrent_requests=1)
    hog, bob, charlie = principal(), principal(one), principal(one)
    keys = [with_key(hog, f"key {number}", one) for number in range(4)]
    for who in (*keys, bob, charlie):
        assert (await queue.submit(who, 1)).done()
    flood = [await queue.submit(key, 1) for _ in range(2) for key in keys]
    assert [task.done() for task in flood] == [False] * 6 + [True] * 2
    for who, waits in ((bob, 3), (charlie, 2)):  # 6 + 3 + 3 and 9 + 2 + 2: about twice WAITERS_MAX
        tasks = [await queue.submit(who, 1) for _ in range(5)]
        assert [task.done() for task in tasks] == [False] * waits + [True] * (5 - waits)
    assert isinstance((await queue.submit(keys[0], 1)).exception(), RateLimitExceeded)


async def test_a_tenant_that_fills_the_queue_of_a_model_does_not_keep_others_from_waiting(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_queue, "WAITERS_PER_QUEUE_MAX", 4)
    policy = ModelPolicy(model="demo", limits=Limits(tokens_per_minute=60), limit_mode="enforce", updated_at=START)
    hog, bob = principal(), principal()
    await queue.submit(hog, 60, policy=policy)
    flood = [await queue.submit(hog, 1, policy=policy) for _ in range(5)]
    assert [task.done() for task in flood] == [False] * 4 + [True]
    tasks = [await queue.submit(bob, 1, policy=policy) for _ in range(3)]
    assert [task.done() for task in tasks] == [False, False, True]


async def test_a_limit_lowered_during_a_wait_applies_and_refuses_a_request_that_can_no_longer_fit(
    queue: Queue,
) -> None:
    bob = principal(Limits(tokens_per_minute=60))
    (await queue.submit(bob, 60)).result().settle(60)
    waiting = await queue.submit(bob, 40)
    lowered = dataclasses.replace(bob, tenant=dataclasses.replace(bob.tenant, limits=Limits(tokens_per_minute=30)))
    await queue.submit(lowered, 1, wait_s=0.0)
    await queue.timer.advance(40.0)
    assert isinstance(waiting.exception(), RequestExceedsLimit)


async def test_a_waiting_request_takes_nothing(queue: Queue) -> None:
    bob = principal(Limits(tokens_per_minute=60, requests_per_minute=10, tokens_per_day=1000), Limits(tokens_per_minute=30))
    (await queue.submit(bob, 30)).result().settle(30)
    before = queue.admission.snapshot(bob)
    waiting = await queue.submit(bob, 20)
    assert queue.admission.snapshot(bob) == before
    assert num_running(queue.admission, bob.tenant.id) == 0
    assert not waiting.done()


async def test_a_raised_limit_admits_waiters_and_a_lowered_one_refuses_them(queue: Queue) -> None:
    bob = principal(Limits(tokens_per_minute=60))
    await queue.submit(bob, 60)
    first, second = await queue.submit(bob, 30), await queue.submit(bob, 30)

    queue.admission.reconfigure(limited(bob, Limits(tokens_per_minute=90)), {})
    await queue.timer.settle()
    assert (first.done(), second.done()) == (True, False)

    queue.admission.reconfigure(limited(bob, Limits(concurrent_requests=0)), {})
    await queue.timer.settle()
    with pytest.raises(RequestExceedsLimit):
        second.result()


async def test_a_correction_that_returns_tokens_wakes_waiters(queue: Queue) -> None:
    bob = principal(Limits(tokens_per_day=100))
    (await queue.submit(bob, 30)).result().settle(30)
    await queue.submit(bob, 50)
    waiting = await queue.submit(bob, 40)
    queue.admission.correct(adjustment(bob, prompt_tokens=-19))
    await queue.timer.settle()
    assert not waiting.done()
    queue.admission.correct(adjustment(bob, prompt_tokens=-1))
    await queue.timer.settle()
    assert waiting.result()


async def test_removed_limits_of_a_model_block_no_waiter(queue: Queue) -> None:
    bob = principal()
    policy = ModelPolicy(model="demo", limits=Limits(requests_per_minute=1), limit_mode="enforce", updated_at=START)
    await queue.submit(bob, 1, policy=policy)
    waiting = await queue.submit(bob, 1, policy=policy)
    queue.admission.reconfigure(limited(bob, Limits()), {"demo": policy})
    await queue.timer.settle()
    assert not waiting.done()
    queue.admission.reconfigure(limited(bob, Limits()), {})
    await queue.timer.settle()
    assert waiting.done()


async def test_a_request_that_waited_while_limits_of_its_model_were_set_counts_towards_them(queue: Queue) -> None:
    bob, charlie = principal(Limits(concurrent_requests=1)), principal()
    policy = ModelPolicy(model="demo", limits=Limits(tokens_per_day=100), limit_mode="enforce", updated_at=START)
    first = (await queue.submit(bob, 10)).result()
    waiting = await queue.submit(bob, 60)
    (await queue.submit(charlie, 10, policy=policy)).result().settle(10)
    first.settle(10)
    await queue.timer.settle()
    waiting.result().settle(60)
    assert isinstance((await queue.submit(charlie, 21, policy=policy, wait_s=0.0)).exception(), RateLimitExceeded)
    assert not (await queue.submit(charlie, 20, policy=policy)).exception()


@pytest.mark.parametrize("seed", range(5))
def test_the_need_ahead_of_a_position_is_the_sum_over_the_waiters_before_it(seed: int) -> None:
    draw, waiter_queue, waiting = random.Random(seed), WaiterQueue[str](), dict[int, tuple[int, bool]]()
    for _ in range(400):
        seq, tokens, wants_window = draw.randrange(30), draw.randrange(100), draw.random() < 0.2
        if draw.random() < 0.4 and waiting:
            left = draw.choice(sorted(waiting))
            waiter_queue.leave(left)
            del waiting[left]
        else:
            waiter_queue.join(seq, f"who {seq}", tokens, wants_window=wants_window)
            waiting[seq] = (tokens, wants_window)
        for position in (seq, None):
            before = [need for each, need in sorted(waiting.items()) if position is None or each < position]
            expected = Ahead(
                requests=len(before), tokens=sum(need[0] for need in before), wants_window=any(need[1] for need in before)
            )
            assert waiter_queue.ahead(position) == expected
        assert list(waiter_queue) == [f"who {each}" for each in sorted(waiting)]


class AdmissionAttempts:
    """Counts attempts of admission: in total, and the most in one iteration of the event loop."""

    def __init__(self, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num = self.most = self._of_turn = 0
        attempt = queue.admission._try

        def counted(*given: Any) -> Any:
            self.num += 1
            self._of_turn += 1
            self.most = max(self.most, self._of_turn)
            return attempt(*given)

        monkeypatch.setattr(queue.admission, "_try", counted)
        self._turns = asyncio.create_task(self._count_turns())

    async def _count_turns(self) -> None:
        while True:
            self._of_turn = 0
            await asyncio.sleep(0)

    def stop(self) -> None:
        self._turns.cancel()


async def test_waiters_leaving_together_cause_one_round_of_retries(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    bob = principal(Limits(concurrent_requests=1))
    await queue.submit(bob, 1)
    waiting = [await queue.submit(bob, 1) for _ in range(admission_queue.WAITERS_PER_QUEUE_MAX)]
    tries = AdmissionAttempts(queue, monkeypatch)
    for task in waiting[: admission_queue.WAITERS_PER_QUEUE_MAX // 2]:
        task.cancel()
    for _ in range(40):
        await asyncio.sleep(0)
    tries.stop()
    assert num_waiting(queue.admission) == admission_queue.WAITERS_PER_QUEUE_MAX // 2
    assert tries.num <= admission_queue.WAITERS_PER_QUEUE_MAX, "everybody was tried again for each who left"
    assert tries.most <= admission_queue.TRIES_PER_TURN, "a whole queue is tried in one turn"


async def test_a_queue_is_retried_to_its_end_even_if_nobody_in_a_turn_has_room(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_queue, "TRIES_PER_TURN", 2)
    bob = principal(Limits(concurrent_requests=1))
    slow = [with_key(bob, f"slow {number}", Limits(tokens_per_minute=60)) for number in range(3)]
    for key in slow:
        (await queue.submit(key, 60)).result().settle(60)
    await queue.submit(bob, 1)
    waiting = [await queue.submit(key, 30) for key in slow]
    last = await queue.submit(bob, 1)
    queue.admission.reconfigure(limited(bob, Limits(concurrent_requests=10)), {})
    await queue.timer.settle()
    assert [task.done() for task in (*waiting, last)] == [False, False, False, True]


async def test_a_full_queue_is_retried_in_several_turns(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    bob = principal(Limits(concurrent_requests=200))
    running = [await queue.submit(bob, 1) for _ in range(200)]
    waiting = [await queue.submit(bob, 1) for _ in range(admission_queue.WAITERS_PER_QUEUE_MAX)]
    tries = AdmissionAttempts(queue, monkeypatch)
    for task in running:
        task.result().settle(1)
    for _ in range(60):
        await asyncio.sleep(0)
    tries.stop()
    assert [task.done() for task in waiting] == [True] * 200 + [False] * 56, "in the order of arrival"
    assert tries.num <= 3 * admission_queue.WAITERS_PER_QUEUE_MAX
    assert tries.most <= admission_queue.TRIES_PER_TURN
