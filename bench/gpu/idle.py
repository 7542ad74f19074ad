"""How much of a stretch of steps the GPU did nothing, in two ways, as neither sees all.

waits    events around each replay of a graph: what lies between two of them is a wait for the host. Nothing within a graph is
         seen, nor that the device was idle while the host was still launching one
gaps     torch's profiler: what no kernel and no copy covers. A kernel that was launched early counts as running while it waits
         for the one before, so kernels have to be launched in turn for it
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from engine.runner.cuda_graphs import CudaGraphs, DirectCalls

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LONG_US = 5.0
"""Gaps above it are waits for the host; those below lie between two kernels of a graph."""


@dataclass(slots=True)
class Replays:
    """The beginning and the end of each, in milliseconds since the first one began, and whose graphs they were."""

    spans_ms: list[tuple[float, float]] = field(default_factory=list)
    graphs: dict[CudaGraphs, None] = field(default_factory=dict)

    @property
    def waits(self) -> float:
        """Share of the time from the first to the last that none covers."""
        if not self.spans_ms:
            raise RuntimeError("no step was replayed or called")
        whole = self.spans_ms[-1][1] - self.spans_ms[0][0]
        return max(0.0, 1 - sum(end - begin for begin, end in self.spans_ms) / max(whole, 1e-9))


@contextmanager
def timed_replays(device: torch.device) -> Iterator[Replays]:
    """Every replay until it is left; the times are there afterwards. A rehearsal times the calls in place of graphs."""
    found = Replays()
    marks: list[tuple[Any, Any]] = []
    replay, call = CudaGraphs.run, DirectCalls.run

    def replayed(graphs: CudaGraphs, key: Hashable, function: Callable[[], None]) -> None:
        found.graphs[graphs] = None
        begin = _mark(device)
        replay(graphs, key, function)
        marks.append((begin, _mark(device)))

    def called(calls: DirectCalls, key: Hashable, function: Callable[[], None]) -> None:
        begin = _mark(device)
        call(calls, key, function)
        marks.append((begin, _mark(device)))

    with mock.patch.object(CudaGraphs, "run", replayed), mock.patch.object(DirectCalls, "run", called):
        yield found
    if device.type == "cuda":
        torch.cuda.synchronize()
    found.spans_ms = [(_since(marks[0][0], begin), _since(marks[0][0], end)) for begin, end in marks]


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return 1000 * time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _since(first: Any, mark: Any) -> float:
    """Milliseconds."""
    return float(mark - first if isinstance(mark, float) else first.elapsed_time(mark))


@dataclass(frozen=True, slots=True)
class Idle:
    """Shares of the span from the first kernel to the last. `long` counts gaps of more than LONG_US alone."""

    share: float
    long: float
    span_us: float
    num_kernels: int
    longest_us: float
    top: dict[str, float]  # names of kernels and their share of the span


def measure_idle(run: Callable[[], object], device: torch.device) -> Idle:
    """Run under the profiler. A rehearsal reads the operations of the CPU, so that the same code sees a trace."""
    on_gpu = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
    return idle_of(events, WORK if on_gpu else ("cpu_op",))


def idle_of(events: list[dict[str, Any]], kinds: tuple[str, ...]) -> Idle:
    """From a trace: the union of what ran, whatever ran side by side."""
    work = sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"]), e["name"]) for e in events if e.get("cat") in kinds)
    if not work:
        raise RuntimeError(f"the profiler saw none of {', '.join(kinds)}")
    first, end = work[0][0], work[0][1]
    gaps: list[float] = []
    of_kernel: dict[str, float] = {}
    for begin, until, name in work:
        if begin > end:
            gaps.append(begin - end)
        end = max(end, until)
        of_kernel[name] = of_kernel.get(name, 0.0) + until - begin
    span = max(end - first, 1e-9)
    top = dict(sorted(((name[:60], taken / span) for name, taken in of_kernel.items()), key=lambda pair: -pair[1])[:12])
    long = sum(gap for gap in gaps if gap > LONG_US)
    return Idle(sum(gaps) / span, long / span, span, len(work), max(gaps, default=0.0), top)
