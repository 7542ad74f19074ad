"""Queue of text chunks between a generation and its response. A slow reader gets fewer and longer chunks, never a gap."""

from __future__ import annotations

from collections import deque

from appliance.serving.chunks import Chunk, merge_chunks
from appliance.serving.wakeup import Wakeup

LOGPROBS_MERGED_MAX = 32  # tokens; about 2 ms of encoding with the twenty likeliest alternatives of each


class ChunkQueue:
    """Holds about `limit` chunks. When full, a new chunk is merged into the last one of its answer, unless that one already has
    LOGPROBS_MERGED_MAX log-probabilities; so memory is bounded by the length of the answers. For one reader."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._chunks: deque[Chunk] = deque()
        self._closed = False
        self._reader = Wakeup()

    @property
    def ended(self) -> bool:
        """Return whether the queue is closed and empty."""
        return self._closed and not self._chunks

    def put(self, chunk: Chunk) -> None:
        """Add `chunk` without waiting."""
        if len(self._chunks) < self._limit or not self._merge_into_last(chunk):
            self._chunks.append(chunk)
        self._reader.wake()

    def close(self) -> None:
        """Close the queue. Chunks that are already in it can still be taken."""
        self._closed = True
        self._reader.wake()
        self._reader.clear()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait until a chunk is there, the queue is closed, or `timeout_s` has passed. Takes nothing."""
        if not self._chunks and not self._closed:
            await self._reader.wait(timeout_s)

    async def take(self, timeout_s: float | None = None) -> list[Chunk]:
        """Wait for a chunk and return all there are. Empty after `timeout_s`, or when the queue has ended."""
        await self.wait(timeout_s)
        chunks = list(self._chunks)
        self._chunks.clear()
        return chunks

    def _merge_into_last(self, chunk: Chunk) -> bool:
        """Merge `chunk` into the last one of its answer; return False if there is none or it has too many log-probabilities."""
        for position in range(len(self._chunks) - 1, -1, -1):
            if self._chunks[position].index == chunk.index:
                if len(self._chunks[position].logprobs) >= LOGPROBS_MERGED_MAX:
                    return False
                self._chunks[position] = merge_chunks(self._chunks[position], chunk)
                return True
        return False
