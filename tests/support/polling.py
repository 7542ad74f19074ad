"""Waiting for conditions that have no event to wait for: within this process, or of other processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

DEADLINE_S = 60.0
PAUSE_S = 0.001
PROCESS_DEADLINE_S = 300.0  # loads a model on a busy machine
PROCESS_PAUSE_S = 0.05


async def poll_until(condition: Callable[[], bool]) -> None:
    """Return when `condition` holds; fail after DEADLINE_S."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - whatever the condition reads, it has no event
            await asyncio.sleep(PAUSE_S)


def block_until(condition: Callable[[], bool], explain: Callable[[], str] = lambda: "") -> None:
    """Return when `condition` holds; fail with the text of `explain` after PROCESS_DEADLINE_S."""
    end_s = time.monotonic() + PROCESS_DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, f"not within {PROCESS_DEADLINE_S} s: {explain()}"
        time.sleep(PROCESS_PAUSE_S)
