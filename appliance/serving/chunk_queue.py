"""Chunks on their way from the generation to the response. A reader that is slow gets fewer and longer chunks, never a gap."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from appliance.serving.text_output import Chunk, joined


class ChunkQueue:
    """Holds at most `limit` chunks; a further one is joined to the last, so memory is bounded by the answer's own length."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._chunks: deque[Chunk] = deque()
        self._closed = False
        self._changed = asyncio.Event()

    def put(self, chunk: Chunk) -> None:
        """Add `chunk` without waiting."""
        if len(self._chunks) >= self._limit:
            chunk = joined(self._chunks.pop(), chunk)
        self._chunks.append(chunk)
        self._changed.set()

    def close(self) -> None:
        """Say that nothing more comes."""
        self._closed = True
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Yield chunks until closed and empty."""
        while True:
            while self._chunks:
                yield self._chunks.popleft()
            if self._closed:
                return
            self._changed.clear()
            await self._changed.wait()
