"""Chunks on their way from the generation to the response. A reader that is slow gets fewer and longer chunks, never a gap."""

from __future__ import annotations

from collections import deque

from appliance.serving.chunks import Chunk, joined
from appliance.serving.wakeup import Wakeup

LOGPROBS_JOINED_MAX = 32  # tokens; some 2 ms of encoding, with the twenty likeliest of each


class ChunkQueue:
    """Holds about `limit` chunks. Beyond it a new chunk is joined to the last of its answer, unless that one has
    LOGPROBS_JOINED_MAX log-probabilities already, so memory is bounded by the length of the answers. It has one reader."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._chunks: deque[Chunk] = deque()
        self._closed = False
        self._reader = Wakeup()

    @property
    def ended(self) -> bool:
        """Return whether everything was taken and nothing more comes."""
        return self._closed and not self._chunks

    def put(self, chunk: Chunk) -> None:
        """Add `chunk` without waiting."""
        if len(self._chunks) < self._limit or not self._joined_to_last(chunk):
            self._chunks.append(chunk)
        self._reader.wake()

    def close(self) -> None:
        """End the queue: nothing more comes, and what is there can still be taken."""
        self._closed = True
        self._reader.wake()
        self._reader.clear()

    async def wait(self, timeout_s: float) -> None:
        """Return when a chunk is there or the queue has ended, and after `timeout_s` anyhow. Takes nothing."""
        if not self._chunks and not self._closed:
            await self._reader.wait(timeout_s)

    async def take(self, timeout_s: float) -> list[Chunk]:
        """Return all chunks that are there; wait for one if need be. Empty after `timeout_s`, or when the queue has ended."""
        if not self._chunks and not self._closed:
            await self._reader.wait(timeout_s)
        chunks = list(self._chunks)
        self._chunks.clear()
        return chunks

    def _joined_to_last(self, chunk: Chunk) -> bool:
        """Join `chunk` to the last one of its answer; return whether there was one."""
        for place in range(len(self._chunks) - 1, -1, -1):
            if self._chunks[place].index == chunk.index:
                if len(self._chunks[place].logprobs) >= LOGPROBS_JOINED_MAX:
                    return False
                self._chunks[place] = joined(self._chunks[place], chunk)
                return True
        return False
