"""A request that is admitted again, because its terms have changed, has the place and the deadline of its first wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from appliance.base.errors import RateLimitExceeded
from appliance.metering.limits import queue as admission_queue
from appliance.metering.limits.limit_waits import LimitWait
from appliance.tenancy.principals import Limits
from tests.support.clock import FakeClock
from tests.support.factories import admission_request, principal
from tests.support.waiting_requests import Queue


@pytest.fixture
async def queue(clock: FakeClock) -> AsyncIterator[Queue]:
    opened = Queue(clock)
    yield opened
    await opened.close()


async def test_a_request_that_is_admitted_again_at_once_does_not_go_behind_those_that_wait(queue: Queue) -> None:
    bob, wait = principal(Limits(concurrent_requests=1)), LimitWait()
    running = await queue.submit(bob, 1)
    first, second = await queue.submit(bob, 1, wait=wait), await queue.submit(bob, 1)
    running.result().settle(1)
    await queue.timer.settle()
    first.result().void()
    assert await queue.admission.admit(admission_request(bob, 1), 60.0, wait)
    await queue.timer.settle()
    assert not second.done()


async def test_a_request_that_waits_again_has_its_earlier_place(queue: Queue) -> None:
    bob, wait = principal(Limits(concurrent_requests=1)), LimitWait()
    running = await queue.submit(bob, 1)
    first, second, third = await queue.submit(bob, 1, wait=wait), await queue.submit(bob, 1), await queue.submit(bob, 1)
    running.result().settle(1)
    await queue.timer.settle()
    first.result().void()
    await queue.timer.settle()
    again = await queue.submit(bob, 1, wait=wait)
    second.result().settle(1)
    await queue.timer.settle()
    assert (again.done(), third.done()) == (True, False)


async def test_a_request_that_waits_again_keeps_the_end_of_its_first_wait(queue: Queue) -> None:
    bob, wait = principal(Limits(concurrent_requests=1)), LimitWait()
    running = await queue.submit(bob, 1)
    first, _second = await queue.submit(bob, 1, wait_s=10.0, wait=wait), await queue.submit(bob, 1)
    await queue.timer.advance(4.0)
    running.result().settle(1)
    await queue.timer.settle()
    first.result().void()
    await queue.timer.settle()
    again = await queue.submit(bob, 1, wait_s=10.0, wait=wait)
    await queue.timer.advance(5.999)
    assert not again.done()
    await queue.timer.advance(0.001)
    assert isinstance(again.exception(), RateLimitExceeded)


async def test_a_request_whose_wait_is_over_is_refused_if_it_is_admitted_again(queue: Queue) -> None:
    bob, wait = principal(Limits(concurrent_requests=1)), LimitWait()
    running = await queue.submit(bob, 1)
    first, _second = await queue.submit(bob, 1, wait_s=10.0, wait=wait), await queue.submit(bob, 1)
    await queue.timer.advance(9.0)
    running.result().settle(1)
    await queue.timer.settle()
    await queue.timer.advance(1.0)
    first.result().void()
    await queue.timer.settle()
    again = await queue.submit(bob, 1, wait_s=10.0, wait=wait)
    assert isinstance(again.exception(), RateLimitExceeded)


async def test_a_request_that_waits_again_has_a_place_in_a_full_queue(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_queue, "WAITERS_PER_QUEUE_MAX", 2)
    bob, wait = principal(Limits(tokens_per_minute=60)), LimitWait()
    await queue.submit(bob, 60)
    first = await queue.submit(bob, 10, wait=wait)
    await queue.timer.advance(10.0)
    others = [await queue.submit(bob, 10) for _ in range(3)]
    assert [task.done() for task in others] == [False, False, True]

    async def admit_again() -> None:
        first.result().void()
        await queue.admission.admit(admission_request(bob, 20), 60.0, wait)

    again = asyncio.create_task(admit_again())
    await queue.timer.settle()
    assert not again.done()
    again.cancel()
    await asyncio.wait({again})
