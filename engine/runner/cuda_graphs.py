"""Captures and replays functions of buffers at fixed addresses as CUDA graphs. Where there are none, `DirectCalls` calls the
function.

A replayed graph costs the host one call, however many kernels it launches. A graph is captured by `make_ready`: at warm-up, or
right before a step without one, and where that step can be computed in another way only if the capture is worth it (`admits`).
All graphs share one memory pool, because only one runs at a time. The function runs once before it is captured, so that kernels
are compiled and libraries initialised; the caller makes sure that this run changes nothing. A capture that failed is not tried
again, because it would fail at every step: asking for its key raises at once.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from engine.errors import EngineBroken
from engine.memory.device import CapturedGraphs, driver_bytes
from engine.runner.graph_eviction import GraphEviction

log = logging.getLogger("gatehouse.engine")


class CaptureFailed(RuntimeError):
    """There is no graph of this key, now or before, and why."""


class Calls(Protocol):
    """Runs a function by key."""

    def is_ready(self, key: Hashable) -> bool:
        """Whether `run` needs no `make_ready` before it."""
        ...

    def admits(self, key: Hashable) -> bool:
        """Whether to `run` a step by this key. Asked once a step, and only where the step can be computed in another way."""
        ...

    def make_ready(self, key: Hashable, function: Callable[[], None], *, is_kept: bool = False) -> None:
        """Prepare `run` for this key. This may call `function`, which must change nothing then. `is_kept`: never evicted, and
        not counted with the others. Raises `CaptureFailed`."""
        ...

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Do what `function` does with its buffers; `make_ready` came first."""
        ...

    def fresh_graphs(self) -> AbstractContextManager[None]:
        """Prepare every key anew within the block, for callers that change what the functions launch; afterwards keys are as
        before."""
        ...

    def discard(self, key: Hashable) -> None:
        """Prepare this key anew when it is next made ready."""
        ...

    @property
    def captured_graphs(self) -> CapturedGraphs:
        """The graphs captured so far, and what the driver allocated for them; what they took of torch's allocator is not
        included."""
        ...


class DirectCalls:
    """The plain twin: every run is a call."""

    def is_ready(self, key: Hashable) -> bool:  # noqa: ARG002 - all of them
        return True

    def admits(self, key: Hashable) -> bool:  # noqa: ARG002 - all of them
        return True

    def make_ready(self, key: Hashable, function: Callable[[], None], *, is_kept: bool = False) -> None:
        """Nothing has to be done."""

    def run(self, key: Hashable, function: Callable[[], None]) -> None:  # noqa: ARG002 - nothing was kept by it
        function()

    def fresh_graphs(self) -> AbstractContextManager[None]:
        """Nothing is kept."""
        return contextlib.nullcontext()

    def discard(self, key: Hashable) -> None:
        """Nothing is kept."""

    @property
    def captured_graphs(self) -> CapturedGraphs:
        """Nothing."""
        return CapturedGraphs()


class CudaGraphs:
    """A graph for each of up to `max_graphs` keys, those that are used most (`graph_eviction`), and for keys that are kept for
    good. CUDA keeps a graph that still runs until it has ended."""

    def __init__(self, device: torch.device, *, max_graphs: int) -> None:
        self._device = device
        self._max_graphs = max_graphs
        self._eviction = GraphEviction(max_graphs)
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._failed: dict[Hashable, str] = {}  # why there is no graph
        self._num_captured = 0
        self._driver_bytes = 0
        self._pool = torch.cuda.graph_pool_handle()
        self._pool_graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()  # that still exist
        self._capture_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def is_ready(self, key: Hashable) -> bool:
        return key in self._graphs

    def admits(self, key: Hashable) -> bool:
        """Whether this key has a graph or is worth one: where all places are taken, keys that come and go would evict each
        other, each at the price of a capture. A key whose capture has failed is not tried again."""
        return key not in self._failed and self._eviction.admits(key)

    def make_ready(self, key: Hashable, function: Callable[[], None], *, is_kept: bool = False) -> None:
        """Capture a graph. Raises `CaptureFailed` when that fails or has failed before."""
        if key in self._failed:
            raise CaptureFailed(self._failed[key])
        started_s = time.perf_counter()
        evicted = None if is_kept else self._eviction.evict_if_full()
        self._graphs.pop(evicted, None)
        try:
            self._graphs[key] = self._warm_up_and_capture(function)
        except Exception as error:
            self._failed[key] = f"the graph of {key} could not be captured: {type(error).__name__}: {error}"
            raise CaptureFailed(self._failed[key]) from error
        if not is_kept:
            self._eviction.add(key, evicted=evicted)
        log.info("captured graph=%s s=%.3f", key, time.perf_counter() - started_s)

    @contextlib.contextmanager
    def fresh_graphs(self) -> Iterator[None]:
        """As `Calls.fresh_graphs`. The block's graphs are dropped when it ends, and not counted; their memory serves those that
        are captured later."""
        before, num_captured = (self._graphs, self._eviction, self._failed), self._num_captured
        self._graphs, self._eviction, self._failed = {}, GraphEviction(self._max_graphs), {}
        is_lost = False
        try:
            yield
        except EngineBroken:  # the process must end, and the device answers nothing
            is_lost = True
            raise
        finally:
            if not is_lost:
                with self._counting_driver_bytes():
                    self._graphs, self._eviction, self._failed = before
                self._num_captured = num_captured

    def discard(self, key: Hashable) -> None:
        """As `Calls.discard`. The graph is not counted any more."""
        if key in self._graphs:
            with self._counting_driver_bytes():
                del self._graphs[key]
            self._eviction.discard(key)
            self._num_captured -= 1

    @contextlib.contextmanager
    def _counting_driver_bytes(self) -> Iterator[None]:
        """Count what the driver takes or gives back within the block, unless that fails."""
        before = driver_bytes(self._device)
        yield
        self._driver_bytes += driver_bytes(self._device) - before

    def _warm_up_and_capture(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        function()  # on the stream of the steps, whose memory it takes: memory of another stream would be kept for that alone
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._capture_stream):
            with self._counting_driver_bytes(), _gc_disabled():
                self._capture(graph, function)
            self._num_captured += 1
        return graph

    def _capture(self, graph: torch.cuda.CUDAGraph, function: Callable[[], None]) -> None:
        if not self._pool_graphs:  # torch's allocator takes no graph into a pool that has lost its last one
            self._pool = torch.cuda.graph_pool_handle()
        # Not `torch.cuda.graph`: it waits for the device and empties the allocator's cache, and steps may be under way.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            function()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # which would say no more than that the capture has failed
                self._end(graph)
            raise
        self._end(graph)

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:  # torch's allocator goes on recording into the pool, and lets no other capture do so
            self._pool_graphs = weakref.WeakSet()  # so that the next capture gets another pool
            raise
        self._pool_graphs.add(graph)

    def run(self, key: Hashable, function: Callable[[], None]) -> None:  # noqa: ARG002 - it was captured
        if key in self._eviction:
            self._eviction.record_use(key)
        self._graphs[key].replay()

    @property
    def captured_graphs(self) -> CapturedGraphs:
        return CapturedGraphs(self._num_captured, max(0, self._driver_bytes))


@contextlib.contextmanager
def _gc_disabled() -> Iterator[None]:
    """Python's collector may destroy the graphs of an engine that was dropped, and a capture fails if another graph is
    destroyed meanwhile."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
