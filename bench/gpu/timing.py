"""Seconds per call of work on a device: calls captured into one graph and replayed, so that the host's launches do not count.

If one call's data would fit into the cache, pass several calls over different memory, which run one after another. Without
a GPU (rehearsal) each call is timed once, and the figures mean nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]
SAMPLE_S = 0.004
"""Minimum length of a sample: events have a resolution of half a microsecond."""
WARM_S = 0.05
"""How long the card is kept busy before the first sample, because its clock falls when idle and takes some tens of milliseconds
to rise. Estimated from the first replay, so a slow first replay shortens it."""


def seconds(calls: Sequence[Call], device: torch.device, *, samples: int = 7, captured: bool = True) -> list[float]:
    """Samples of the mean seconds per call."""
    if device.type != "cuda":
        started_s = time.perf_counter()
        for call in calls:
            call()
        return [(time.perf_counter() - started_s) / len(calls)]
    for call in calls:  # compile, and create what is created once
        call()
    torch.cuda.synchronize()
    replay = _captured(calls) if captured else lambda: [call() for call in calls]
    repeats = max(1, round(SAMPLE_S / _warm_up(replay)))
    return [_elapsed(replay, repeats) / repeats / len(calls) for _ in range(samples)]


def _warm_up(replay: Call) -> float:
    """Keep the card busy for WARM_S; return the seconds of one replay."""
    once_s = max(_elapsed(replay, 1), 1e-6)
    count = math.ceil(WARM_S / once_s) - 1
    return max(_elapsed(replay, count) / count, 1e-6) if count else once_s


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _captured(calls: Sequence[Call]) -> Call:
    def call_all() -> None:  # each result is freed before the next call: a later one may use its memory
        for call in calls:
            call()

    replay = capture(call_all)
    replay()
    torch.cuda.synchronize()
    return replay


def capture(call: Call) -> Call:
    """Capture a call into a graph, after running it once on a side stream; return the function that replays the graph."""
    side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        call()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _elapsed(replay: Call, repeats: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(repeats):
        replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1000
