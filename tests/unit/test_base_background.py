"""Background tasks: start, stop and restart, logging of errors, and repeated work."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from appliance.base.background import Background, repeat


async def test_a_task_runs_from_start_to_stop() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def run() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    background = Background("work", run)
    seen = [background.started]
    background.start()
    seen.append(background.started)
    await began.wait()
    await background.stop()
    assert ended.is_set(), "stop waits for the end of the task"
    assert [*seen, background.started] == [False, True, False]


async def test_stopping_is_idempotent_and_a_task_can_be_restarted() -> None:
    runs = []

    async def run() -> None:
        runs.append(asyncio.current_task())
        await asyncio.Event().wait()

    background = Background("work", run)
    await background.stop()
    for _ in range(2):
        background.start()
        await asyncio.sleep(0)
        await background.stop()
    await background.stop()
    assert [task.get_name() for task in runs if task is not None] == ["work", "work"]


async def test_starting_twice_is_an_error() -> None:
    background = Background("work", asyncio.Event().wait)  # type: ignore[arg-type]
    background.start()
    with pytest.raises(AssertionError, match="work"):
        background.start()
    await background.stop()


@pytest.mark.parametrize("when", ["during_the_run", "during_stop"])
async def test_an_error_is_logged_immediately_and_not_raised_by_stop(when: str) -> None:
    async def run() -> None:
        try:
            if when == "during_stop":
                await asyncio.Event().wait()
        finally:
            raise ValueError("a bug")

    background = Background("work", run)
    with structlog.testing.capture_logs() as logs:
        background.start()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(logs) == (1 if when == "during_the_run" else 0)
        await background.stop()
    (line,) = logs
    assert (line["task"], repr(line["exc_info"])) == ("work", "ValueError('a bug')")


@pytest.mark.parametrize("immediately", [False, True])
async def test_repeated_work_continues_after_an_error(immediately: bool) -> None:
    done: list[str] = []
    enough = asyncio.Event()

    async def work() -> None:
        done.append("work")
        if done.count("work") == 1:
            raise ValueError("a bug")

    async def sleep(seconds: float) -> None:
        assert seconds == 5.0
        if done.count("work") == 2:
            enough.set()
            await asyncio.Event().wait()
        done.append("pause")

    background = Background("work", lambda: repeat(work, 5.0, failure="it failed", immediately=immediately, sleep=sleep))
    with structlog.testing.capture_logs() as logs:
        background.start()
        await enough.wait()
        await background.stop()
    assert done == (["work", "pause", "work"] if immediately else ["pause", "work", "pause", "work"])
    assert [(line["event"], line["log_level"]) for line in logs] == [("it failed", "error"), ("works again", "warning")]


async def test_repeated_failures_are_logged_once_with_their_number_at_the_end() -> None:
    runs = 0
    well = asyncio.Event()

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs <= 5:
            raise OSError("down")
        if runs == 7:
            well.set()
            await asyncio.Event().wait()

    async def sleep(_seconds: float) -> None:
        await asyncio.sleep(0)

    background = Background("work", lambda: repeat(work, 5.0, failure="it failed", sleep=sleep))
    with structlog.testing.capture_logs() as logs:
        background.start()
        await well.wait()
        await background.stop()
    assert [(line["event"], line.get("after"), line["failures"]) for line in logs] == [
        ("it failed", None, 1),
        ("works again", "it failed", 5),
    ]
