"""Time limits do not count time in which the process stood still."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from appliance.base.awake_time import TICK_S, AwakeStopwatch, done_within
from tests.support.polling import poll_until

Pause = Callable[[float], None]


@pytest.fixture
async def pause(monkeypatch: pytest.MonkeyPatch) -> Pause:
    """A call after which the event loop finds that so many seconds have passed."""
    paused_s = [0.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: time.monotonic() + sum(paused_s))
    return paused_s.append


async def test_what_was_done_while_the_process_stood_still_was_done_in_time(pause: Pause) -> None:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def stand_still() -> None:
        pause(3600.0)
        loop.call_soon(loop.call_soon, future.set_result, None)  # seen after the limits by the clock

    loop.call_soon(stand_still)
    assert await done_within(future, 60.0)


async def test_what_is_not_done_in_time_is_not_cancelled(pause: Pause) -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(done_within(future, 60.0))
    for _ in range(2):
        assert not waiting.done()
        pause(30.0)
        for _ in range(5):
            await asyncio.sleep(0)
    assert (await waiting, future.done()) == (False, False)


async def test_a_cancelled_wait_leaves_the_future_alone() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(done_within(future, 60.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not future.done()


async def test_a_pause_counts_as_one_tick_and_a_stopwatch_counts_from_its_start_to_its_stop(pause: Pause) -> None:
    watch = AwakeStopwatch()
    for _ in range(2):
        assert watch.elapsed_s == 0.0
        watch.start()
        for ticks, paused_s in ((1, TICK_S), (2, 3600.0), (3, TICK_S)):
            pause(paused_s)
            await poll_until(lambda: watch.elapsed_s >= ticks * TICK_S)  # noqa: B023 - called in this iteration
            assert watch.elapsed_s == ticks * TICK_S
        watch.stop()
    assert watch.elapsed_s == 0.0
