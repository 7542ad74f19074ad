"""Chunks on their way from the generation to the response. A reader that is slow gets fewer and longer chunks, never a gap."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

from appliance.serving.text_output import Chunk, joined


class ChunkQueue:
    """Holds at most `limit` chunks; a further one is joined to the last, so memory is bounded by the answer's own length."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._chunks: deque[Chunk] = deque()
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Return whether everything was taken and nothing more comes."""
        return self._closed and not self._chunks

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

    async def take(self, timeout_s: float) -> list[Chunk]:
        """Return all chunks that are there; wait for one if need be. Empty after `timeout_s`, or when the queue has ended."""
        if not self._chunks and not self._closed:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
        chunks = list(self._chunks)
        self._chunks.clear()
        return chunks
