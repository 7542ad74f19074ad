"""For how much of a series of steps the GPU was idle, as far as that can be observed.

waits    events around each replay of a graph, as it is served: what lies between two of them is a wait for the host. Nothing
         within a graph is seen, nor that the device was idle while the host was still launching one
busy     torch's profiler, over steps whose kernels are launched in turn: what any kernel or copy covers, for each step. A
         kernel that is launched early would count as running while it waits for the one before. Judged is 1 - busy / served
         step, where the served step has its kernels launched early and no profiler, and never less than the waits
gaps     of the same trace: what nothing covers. No served step has them, and the profiler widens them

How a step that idles could pass, and what is done about it:

kernels overlap in the trace (they were launched early all the same), which counts waiting as running: the row fails
the profiler makes kernels longer, beyond the step in turn as it is without the profiler: the row fails
requests are longer by the time of the trace, so kernels take longer than in the served step: its time is moved on to there
a step launched before the trace runs within it: nothing is under way when the trace begins
an idle host is made up for by kernels that overlap when they are launched early: waits count whatever kernels do

What is left: within a graph, an early launch may make up for a gap at another place. What is judged is what a step loses
against its own kernels one after the other without any gap. A trace that lost kernels shows more idle time, not less.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest import mock

import torch

from engine.runner.cuda_graphs import CudaGraphs, DirectCalls

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
OVERLAP_MAX = 0.01
"""Of a trace: copies of inputs beside a kernel. Kernels that are launched early overlap by more."""
LONG_US = 5.0
"""Longer gaps are waits for the host; shorter ones are between two kernels of a graph."""


@dataclass(slots=True)
class Replays:
    """Replays of graphs: when each began and ended, in milliseconds since the first began, and whose graphs they were."""

    spans_ms: list[tuple[float, float]] = field(default_factory=list)
    graphs: dict[CudaGraphs, None] = field(default_factory=dict)

    @property
    def waits(self) -> float:
        """The share of the time from the first replay to the last that no replay covers."""
        if not self.spans_ms:
            raise RuntimeError("no step was replayed or called")
        whole = self.spans_ms[-1][1] - self.spans_ms[0][0]
        return max(0.0, 1 - sum(end - begin for begin, end in self.spans_ms) / max(whole, 1e-9))


@contextmanager
def timed_replays(device: torch.device) -> Iterator[Replays]:
    """Time every replay inside the block; the times are there behind it. A rehearsal times the calls in place of graphs."""
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
    """Milliseconds from one mark to another."""
    return float(mark - first if isinstance(mark, float) else first.elapsed_time(mark))


@dataclass(frozen=True, slots=True)
class Idle:
    """Shares of the span from the first kernel to the last. `long` counts only gaps of more than LONG_US."""

    share: float
    long: float
    span_us: float
    num_kernels: int
    longest_us: float
    top: dict[str, float]  # names of kernels and their share of the span
    overlap: float = 0.0  # what ran beside something else


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps in a row, in seconds. `at` is the number of the first one, counted from any step before."""

    at: float
    step_s: list[float]

    @property
    def warm_s(self) -> list[float]:
        """The steps without the first, which also holds time before it was called."""
        return self.step_s[1:]

    def step_at(self, at: float, growth: float) -> float:
        """Seconds of a step at another place, where a step is longer by `growth` than the one before."""
        return mean(self.warm_s) + growth * (at - self.at - len(self.step_s) / 2)


def growth_s(earlier: Stretch, later: Stretch) -> float:
    """By how many seconds a step is longer than the one before, since requests grow: the median over steps at the same place of
    each stretch, so that a disturbed one counts as any other. Never negative: that would be a card that warms up."""
    longer = [after - before for before, after in zip(earlier.warm_s, later.warm_s, strict=False)]
    return max(0.0, median(longer) / (later.at - earlier.at))


@dataclass(frozen=True, slots=True)
class Traced:
    """A trace of steps launched in turn; a served step and one in turn, both without the profiler, at its place; and the share
    of waits, as served."""

    trace: Idle
    num_steps: int
    served_s: float
    in_turn_s: float
    waits: float

    @property
    def busy_us(self) -> float:
        """Per step."""
        return self.trace.span_us * (1 - self.trace.share) / self.num_steps

    @property
    def busy(self) -> float:
        """Of a served step; above 1 if early launches save more than gaps cost."""
        return self.busy_us / (1e6 * self.served_s)

    @property
    def idle(self) -> float:
        return max(0.0, self.waits, 1 - self.busy)

    @property
    def wrong(self) -> str:
        """Why the trace does not tell how long kernels take, or nothing."""
        if self.trace.overlap > OVERLAP_MAX:
            return f"{100 * self.trace.overlap:.1f} % of the trace overlaps: its kernels were not launched in turn"
        if self.busy_us > 1e6 * self.in_turn_s:
            step = f"a step in turn takes {1e6 * self.in_turn_s:.0f} without the profiler"
            return f"the kernels of a step take {self.busy_us:.0f} µs in the trace, where {step}: these are not their durations"
        return ""


def measure_idle(run: Callable[[], object], device: torch.device) -> Idle:
    """Run under the profiler. A rehearsal reads the operations of the CPU, so that the same code sees a trace."""
    on_gpu = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    if on_gpu:
        torch.cuda.synchronize()  # a step under way would be in the trace beside those of `run`
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
    overlap = sum(of_kernel.values()) - (span - sum(gaps))
    return Idle(sum(gaps) / span, long / span, span, len(work), max(gaps, default=0.0), top, overlap / span)
