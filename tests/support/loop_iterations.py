"""Runs or counts iterations of the event loop, to let other tasks run or to show that they could."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


async def run_iterations(number: int) -> None:
    """Return after so many iterations of the event loop."""
    for _ in range(number):
        await asyncio.sleep(0)


class LoopIterations:
    """The number of iterations of the event loop so far."""

    count = 0


@asynccontextmanager
async def count_iterations() -> AsyncIterator[LoopIterations]:
    """Count the event loop's iterations until the end of the block."""
    iterations = LoopIterations()

    async def run() -> None:
        for iterations.count in itertools.count(1):
            await asyncio.sleep(0)

    other = asyncio.create_task(run())
    try:
        yield iterations
    finally:
        other.cancel()
