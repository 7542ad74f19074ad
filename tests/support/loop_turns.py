"""Counts turns of the event loop: others run meanwhile."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class LoopTurns:
    """Of the event loop, so far."""

    count = 0


@asynccontextmanager
async def counted_turns() -> AsyncIterator[LoopTurns]:
    """Something that runs in every turn, until the end of the block."""
    turns = LoopTurns()

    async def run() -> None:
        for turns.count in itertools.count(1):
            await asyncio.sleep(0)

    other = asyncio.create_task(run())
    try:
        yield turns
    finally:
        other.cancel()
