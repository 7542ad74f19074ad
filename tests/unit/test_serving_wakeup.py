"""One task waits for another: woken or timed out; an earlier timer never affects a later wait."""

from __future__ import annotations

import asyncio

from appliance.serving.wakeup import Wakeup


class HeldLoop(asyncio.SelectorEventLoop):
    """An event loop with a manual clock."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    async def move_to(self, now_s: float) -> None:
        """Advance the clock and run what is due."""
        await asyncio.sleep(0)
        self.now_s = now_s
        for _ in range(3):
            await asyncio.sleep(0)


def test_a_waiter_is_woken() -> None:
    async def scene() -> bool:
        wakeup = Wakeup()
        waiter = asyncio.create_task(wakeup.wait(3600.0))
        await asyncio.sleep(0)
        wakeup.wake()
        await waiter
        wakeup.clear()
        return waiter.done()

    assert asyncio.run(scene())


def test_a_wake_without_a_waiter_is_not_remembered() -> None:
    async def scene() -> bool:
        wakeup = Wakeup()
        wakeup.wake()
        waiter = asyncio.create_task(wakeup.wait())
        await asyncio.sleep(0)
        waited = not waiter.done()
        wakeup.wake()
        await waiter
        return waited

    assert asyncio.run(scene())


def test_a_wait_ends_at_its_timeout_and_no_sooner() -> None:
    async def scene() -> list[float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, HeldLoop)
        wakeup, ends_s = Wakeup(), []
        first = asyncio.create_task(wakeup.wait(15.0))
        await loop.move_to(10.0)
        wakeup.wake()
        await first
        for timeout_s in (15.0, 1.0):
            waiter = asyncio.create_task(wakeup.wait(timeout_s))
            while not waiter.done():
                await loop.move_to(loop.now_s + 0.5)
            ends_s.append(loop.now_s)
        return ends_s

    with asyncio.Runner(loop_factory=HeldLoop) as runner:
        assert runner.run(scene()) == [25.0, 26.0]  # the timer of the first wait fired at 15


def test_a_cancelled_wait_leaves_no_waiter_behind() -> None:
    async def scene() -> bool:
        wakeup = Wakeup()
        waiter = asyncio.create_task(wakeup.wait(3600.0))
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.wait({waiter})
        wakeup.wake()
        wakeup.clear()
        return waiter.cancelled()

    assert asyncio.run(scene())
