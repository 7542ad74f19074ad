"""Captured work: replaces `torch.cuda.CUDAGraph` during a rehearsal.

A capture stores operations with the memory and scalars that they were launched with, and a replay launches these again: scalars
computed in Python and tensors reallocated or freed since then lead to wrong results. Operations that no capture permits raise:
waiting for the device, copying from pageable memory, pinning memory. A capture fails at its end after such an operation, or if
another graph was destroyed meanwhile, and torch 2.11 then keeps recording into its memory pool. A pool that has lost its last
graph takes no other one, until the allocator's cache is emptied (`create_or_incref_pool` in c10/cuda/CUDACachingAllocator.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.rehearsal.card import LAUNCH_BYTES, Stream, Work, current_card


class Graph:
    """Captured works in order, flattened where a capture forks."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.card = current_card()
        self.works: list[Work] = []
        self.streams: list[Stream] = []
        self._pool: object = None
        self._captured = False
        self._invalid_reason = ""

    def __del__(self) -> None:
        if self._captured:
            self._invalidate_other_capture()
            self._release_memory()

    def _release_memory(self) -> None:
        self.card.graph_bytes -= len(self.works) * LAUNCH_BYTES
        self.card.pool_uses[self._pool] -= 1

    def _invalidate_other_capture(self) -> None:
        capture = self.card.capture
        if capture is not None and capture is not self:
            capture.invalidate("another graph was destroyed meanwhile")

    def invalidate(self, why: str) -> None:
        """Make the current capture fail at its end."""
        self._invalid_reason = self._invalid_reason or why

    def captures(self, stream: Stream) -> bool:
        """Whether work on this stream belongs to this capture."""
        return stream in self.streams

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        card = self.card
        assert capture_error_mode in ("global", "thread_local", "relaxed"), capture_error_mode
        if self._captured:
            raise RuntimeError("this graph has been captured already")
        if card.capture is not None:
            raise RuntimeError("CUDA error: a capture is under way on another graph")
        if card.stream is card.streams[0]:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self._pool = card.make_pool() if pool is None else pool
        if self._pool in card.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        if card.pool_uses.get(self._pool) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED: the pool has lost its last graph")
        card.pool_uses[self._pool] = card.pool_uses.get(self._pool, 0) + 1
        card.recording.add(self._pool)
        self.streams = [card.stream]
        card.capture = self

    def capture_end(self) -> None:
        assert self.card.capture is self, "no capture of this graph is under way"
        if self.card.stream is not self.streams[0]:
            raise RuntimeError("the capture must end on the stream on which it began")
        self.card.capture = None
        if self._invalid_reason:
            raise RuntimeError(f"CUDA error: operation failed due to a previous error during capture: {self._invalid_reason}")
        self.card.recording.remove(self._pool)
        self.card.num_captures += 1
        self.card.graph_bytes += len(self.works) * LAUNCH_BYTES
        self._captured = True

    def replay(self) -> None:
        if not self._captured:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self.card.refuse_in_capture("a replay")
        self.card.num_replays += 1
        for work in self.works:
            self.card.stream.add(work)

    def reset(self) -> None:
        self._invalidate_other_capture()
        if self._captured:
            self._release_memory()
        self.works, self._captured = [], False

    def pool(self) -> tuple[int, int]:
        return (0, 1)


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """`torch.cuda.stream`."""
    if stream is None:
        yield
        return
    card = current_card()
    before, card.stream = card.stream, stream
    try:
        yield
    finally:
        card.stream = before


@contextmanager
def capture_graph(
    graph: Graph, pool: object = None, stream: Stream | None = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """`torch.cuda.graph`; waits for the device first."""
    card = current_card()
    card.wait_for_all("torch.cuda.graph")
    with on_stream(stream or Stream()):
        graph.capture_begin(pool, capture_error_mode=capture_error_mode)
        try:
            yield
        finally:
            graph.capture_end()
