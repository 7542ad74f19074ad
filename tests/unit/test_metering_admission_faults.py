"""Unexpected errors while requests are admitted or wait in the admission queue fail only that request, and are logged."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from appliance.metering.limits.allowances import Allowance
from appliance.metering.limits.queue import AdmissionQueue, Waiter
from appliance.metering.limits.token_bucket import TokenBucket
from appliance.tenancy.model_policies import ModelPolicy
from appliance.tenancy.principals import Limits
from tests.support.clock import START, FakeClock
from tests.support.factories import principal
from tests.support.ledgers import num_running, num_waiting
from tests.support.waiting_requests import Queue, Waits, limited

TWO = Limits(concurrent_requests=2)


class BugError(Exception):
    """The unexpected error raised by these tests."""


@pytest.fixture
async def queue(clock: FakeClock) -> AsyncIterator[Queue]:
    opened = Queue(clock, waits=Waits())
    yield opened
    await opened.close()


def failing(real: Callable[..., Any], fails: Callable[..., bool] = lambda *_given: True) -> Callable[..., Any]:
    """Return `real`, raising BugError where `fails` returns true."""

    def broken(*arguments: Any, **options: Any) -> Any:
        if fails(*arguments):
            raise BugError
        return real(*arguments, **options)

    return broken


def break_step(queue: Queue, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break one step for requests of seven tokens ("the estimate": for every refused request)."""
    admission = queue.admission
    if step == "the attempt":
        monkeypatch.setattr(admission, "_try", failing(admission._try, lambda request, *_more: request.prompt_tokens == 7))
    elif step == "the estimate":
        monkeypatch.setattr(admission._running, "estimate", failing(admission._running.estimate))
    else:
        admission_queue = admission._queue
        for_seven = failing(admission_queue._join_queues, lambda waiter, _refusals: waiter.request.prompt_tokens == 7)
        monkeypatch.setattr(admission_queue, "_join_queues", for_seven)


@pytest.mark.parametrize("step", ["the attempt", "the estimate", "the queues"])
async def test_an_unexpected_error_in_a_retry_fails_only_that_request(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], step: str
) -> None:
    bob = principal(TWO)
    running = [await queue.submit(bob, 1) for _ in range(2)]
    first, second = await queue.submit(bob, 7, wait_s=5.0), await queue.submit(bob, 1)
    break_step(queue, step, monkeypatch)
    queue.admission.reconfigure(limited(bob, TWO), {})
    await queue.timer.settle()
    await queue.timer.advance(5.0)
    assert isinstance(first.exception(), BugError)
    assert capfd.readouterr().out.count("Traceback") == 1, "logged once, although another request still waits"

    running[0].result().settle(1)
    await queue.timer.settle()
    assert second.result()


async def test_an_unexpected_error_while_joining_the_queues_leaves_no_waiter_behind(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    bob = principal(TWO)
    for _ in range(2):
        await queue.submit(bob, 1)
    break_step(queue, "the queues", monkeypatch)
    assert isinstance((await queue.submit(bob, 7)).exception(), BugError)
    assert num_waiting(queue.admission) == 0


async def test_a_reservation_that_cannot_be_delivered_is_given_back(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    bob = principal(TWO)
    running = [await queue.submit(bob, 1) for _ in range(2)]
    first, second = await queue.submit(bob, 7), await queue.submit(bob, 1)
    leave, failures = AdmissionQueue._leave_queue, [BugError()]

    def leave_once(admission_queue: AdmissionQueue, waiter: Waiter, allowance: Allowance) -> None:
        if failures:
            raise failures.pop()
        leave(admission_queue, waiter, allowance)

    monkeypatch.setattr(AdmissionQueue, "_leave_queue", leave_once)
    running[0].result().settle(1)
    await queue.timer.settle()
    assert isinstance(first.exception(), BugError)
    assert second.result()
    assert num_running(queue.admission, bob.tenant.id) == 2


async def test_a_wait_ended_by_an_unexpected_error_is_counted_as_failed(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, bob = Waits(), principal(TWO)
    queue = Queue(clock, waits=waits)
    for _ in range(2):
        await queue.submit(bob, 1)
    await queue.submit(bob, 7)
    break_step(queue, "the attempt", monkeypatch)
    await queue.timer.advance(3.0)
    queue.admission.reconfigure(limited(bob, TWO), {})
    await queue.timer.settle()
    assert waits.records == [("failed", "demo", 3.0)]
    await queue.close()


@pytest.mark.parametrize("broken", ["take", "the second bucket", "adopt"])
async def test_an_unexpected_error_while_reserving_leaves_nothing_reserved(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    limits = Limits(concurrent_requests=2, tokens_per_minute=60, requests_per_minute=60, tokens_per_day=100)
    bob, policy = principal(limits, limits), ModelPolicy(model="demo", limits=limits, limit_mode="enforce", updated_at=START)
    (await queue.submit(bob, 10, policy=policy)).result().void()
    allowances = list(queue.admission._allowances.values())
    assert [allowance.owner.scope for allowance in allowances] == ["tenant", "key", "model"]
    before, at = [allowance.in_use(queue.admission._moment()) for allowance in allowances], queue.admission._moment()
    with monkeypatch.context() as bug:
        if broken == "adopt":  # without the policy the model's limits do not hold, but what uses it counts there
            bug.setattr(Allowance, "adopt", failing(Allowance.adopt))
            failed = await queue.submit(bob, 10)
        else:
            last = allowances[-1]
            kind, failing_object = (Allowance, last) if broken == "take" else (TokenBucket, last.requests)
            bug.setattr(kind, "take", failing(kind.take, lambda self, *_given: self is failing_object))
            failed = await queue.submit(bob, 10, policy=policy)
    assert isinstance(failed.exception(), BugError)
    assert [allowance.in_use(at) for allowance in allowances] == before
    for tokens in (50, 10):
        (await queue.submit(bob, tokens, policy=policy)).result()
