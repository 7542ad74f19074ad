"""Engine output is logged at the engine's own level, so its warnings appear when only warnings are shown."""

from __future__ import annotations

import asyncio

import structlog

from appliance.serving.engine_log import LINE_BYTES_MAX, forward_log


async def forwarded(printed: bytes) -> list[tuple[str, str]]:
    output = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    output.feed_data(printed)
    output.feed_eof()
    with structlog.testing.capture_logs() as lines:
        await forward_log(output, model="demo", pid=7)
    assert all((line["role"], line["model"], line["pid"]) == ("engine", "demo", 7) for line in lines)
    return [(line["log_level"], line["event"]) for line in lines]


async def test_level_and_text_are_those_of_the_engine() -> None:
    printed = b"INFO gatehouse.engine ready model=demo\nWARNING gatehouse.engine a step failed\n"
    assert await forwarded(printed) == [("info", "ready model=demo"), ("warning", "a step failed")]


async def test_a_traceback_has_the_level_of_its_error() -> None:
    printed = b"ERROR gatehouse.engine step failed\nTraceback (most recent call last):\n\nKeyError: 5"
    assert {level for level, _ in await forwarded(printed)} == {"error"}


async def test_output_without_a_logger_is_a_warning() -> None:
    assert await forwarded(b"python: cannot load libcuda\n") == [("warning", "python: cannot load libcuda")]


async def test_a_line_of_a_library_names_its_logger() -> None:
    output = asyncio.StreamReader()
    output.feed_data(b"WARNING some.library hello")
    output.feed_eof()
    with structlog.testing.capture_logs() as lines:
        await forward_log(output, model="demo", pid=7)
    assert [(line["event"], line["logger"]) for line in lines] == [("hello", "some.library")]


async def test_an_overlong_line_is_split() -> None:
    assert sum(len(text) for _, text in await forwarded(b"x" * (3 * LINE_BYTES_MAX))) == 3 * LINE_BYTES_MAX
