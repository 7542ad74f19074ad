"""Tenants take turns: a burst delays only its own tenant, and no permit is lost when callers are cancelled."""

from __future__ import annotations

import asyncio
import random

import pytest

from appliance.base.errors import Overloaded
from appliance.serving.fair_semaphore import FairSemaphore


def make_semaphore(at_a_time: int, waiting_max: int = 100) -> FairSemaphore:
    return FairSemaphore(at_a_time, waiting_max, refusal="too many wait", retry_after_s=1.0)


async def settle() -> None:
    """Let all tasks run until they wait."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_tenants_take_turns() -> None:
    semaphore, order = make_semaphore(1), []

    async def work(name: str) -> None:
        await semaphore.acquire(name[0])
        order.append(name)

    tasks = [asyncio.create_task(work(name)) for name in ("a1", "a2", "a3", "a4", "b1", "c1", "b2")]
    for _ in tasks:
        await settle()
        semaphore.release()
    assert order == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_the_longest_queue_loses_its_last_caller_unless_the_newcomers_is_as_long() -> None:
    semaphore = make_semaphore(1, waiting_max=3)
    await semaphore.acquire("alice")
    flood = [asyncio.create_task(semaphore.acquire("alice")) for _ in range(3)]
    await settle()
    with pytest.raises(Overloaded, match="too many wait"):
        await semaphore.acquire("alice")
    waiting = asyncio.create_task(semaphore.acquire("bob"))
    await settle()
    assert [task.done() for task in flood] == [False, False, True]
    assert isinstance(flood[2].exception(), Overloaded)
    with pytest.raises(Overloaded):
        await semaphore.acquire("bob")
    semaphore.release()
    semaphore.release()
    await waiting
    for task in flood[:2]:
        task.cancel()


async def test_no_permit_is_lost_whenever_callers_are_cancelled() -> None:
    chance = random.Random(3)
    for _ in range(200):
        semaphore = make_semaphore(2, waiting_max=6)
        holding = 0

        async def hold(tenant_id: str, semaphore: FairSemaphore = semaphore) -> None:
            nonlocal holding
            await semaphore.acquire(tenant_id)
            holding += 1
            assert holding <= 2
            try:
                for _ in range(chance.randrange(3)):
                    await asyncio.sleep(0)
            finally:
                holding -= 1
                semaphore.release()

        tasks = [asyncio.create_task(hold(chance.choice("abc"))) for _ in range(8)]
        for task in tasks:
            if chance.random() < 0.4:
                task.cancel()
            if chance.random() < 0.5:
                await asyncio.sleep(0)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError | Overloaded) for result in ended)
        assert (semaphore._free, semaphore._queues) == (2, {})
