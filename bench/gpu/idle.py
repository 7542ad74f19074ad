"""The share of a series of steps during which the GPU was idle, as far as that can be observed.

waits    from events around each replay of a graph, as served: the time between two replays is a wait for the host. Idle time
         within a graph is not seen, nor is a device that was idle while the host was still launching a graph
busy     from torch's profiler, over steps whose kernels are launched in turn: the time per step in which any kernel or copy
         runs. (A kernel launched early would count as running while it waits for its predecessor.) The judged figure is
         1 - busy / served step, but at least the waits; the served step launches its kernels early, without the profiler
gaps     from the same trace: the time in which nothing runs. A served step has no such gaps, and the profiler widens them

How an idle step could go unnoticed, and what prevents that:

kernels overlap in the trace (they were launched early after all), so waiting counts as running: the row fails
the profiler makes kernels take longer than a step launched in turn takes without the profiler: the row fails
requests are longer when the trace begins, so kernels take longer than in the served step: the served time is extrapolated
a step launched before the trace runs within it: no work is under way when the trace begins
overlap from early launches makes up for a host that causes waits: waits count whatever the kernels do

One case remains: within a graph, an early launch may make up for a gap elsewhere. The judged figure is therefore what a step
loses compared with running its kernels back to back without gaps. A trace that lost kernels shows more idle time, not less.
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
from engine.runner.staging import record

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
OVERLAP_MAX = 0.01
"""Allowed overlap in a trace: input copies run alongside a kernel. Kernels that are launched early overlap by more."""
KERNELS_NAMED = 12
LONG_US = 5.0
"""Longer gaps are waits for the host; shorter ones lie between two kernels of a graph."""


@dataclass(slots=True)
class Replays:
    """Graph replays: begin and end of each, in milliseconds since the first began, and the objects that own the graphs."""

    spans_ms: list[tuple[float, float]] = field(default_factory=list)
    graphs: dict[CudaGraphs, None] = field(default_factory=dict)

    @property
    def waits(self) -> float:
        """The share of the time from the first replay to the last during which no replay runs."""
        if not self.spans_ms:
            raise RuntimeError("no step was replayed or called")
        whole = self.spans_ms[-1][1] - self.spans_ms[0][0]
        return max(0.0, 1 - sum(end - begin for begin, end in self.spans_ms) / max(whole, 1e-9))


@contextmanager
def timed_replays(device: torch.device) -> Iterator[Replays]:
    """Time every replay inside the block; the times are available after it. A rehearsal times the direct calls instead."""
    replays = Replays()
    marks: list[tuple[Any, Any]] = []
    replay, call = CudaGraphs.run, DirectCalls.run

    def timed_replay(graphs: CudaGraphs, key: Hashable, function: Callable[[], None]) -> None:
        replays.graphs[graphs] = None
        begin = _mark(device)
        replay(graphs, key, function)
        marks.append((begin, _mark(device)))

    def timed_call(calls: DirectCalls, key: Hashable, function: Callable[[], None]) -> None:
        begin = _mark(device)
        call(calls, key, function)
        marks.append((begin, _mark(device)))

    with mock.patch.object(CudaGraphs, "run", timed_replay), mock.patch.object(DirectCalls, "run", timed_call):
        yield replays
    if device.type == "cuda":
        torch.cuda.synchronize()
    replays.spans_ms = [(_ms_between(marks[0][0], begin), _ms_between(marks[0][0], end)) for begin, end in marks]


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return 1000 * time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    record(event)
    return event


def _ms_between(first: Any, mark: Any) -> float:
    """Milliseconds from one mark to another."""
    return float(mark - first if isinstance(mark, float) else first.elapsed_time(mark))


@dataclass(frozen=True, slots=True)
class Idle:
    """Idle shares of the span from the first kernel to the last. `long` counts only gaps of more than LONG_US."""

    share: float
    long: float
    span_us: float
    num_kernels: int
    longest_us: float
    top: dict[str, float]  # names of kernels and their share of the span
    overlap: float = 0.0  # the share in which more than one kernel or copy ran


@dataclass(frozen=True, slots=True)
class StepSpan:
    """Consecutive steps, in seconds. `at` is the number of the first one, counted from any earlier step."""

    at: float
    step_s: list[float]

    @property
    def warm_s(self) -> list[float]:
        """All steps but the first, which also includes time before it was called."""
        return self.step_s[1:]

    def step_at(self, at: float, growth: float) -> float:
        """Seconds of a step at another position, if each step takes `growth` seconds longer than the one before."""
        return mean(self.warm_s) + growth * (at - self.at - len(self.step_s) / 2)


def growth_s(earlier: StepSpan, later: StepSpan) -> float:
    """How many seconds longer each step takes than the one before, because requests grow: the median over steps at the same
    position in both series, so that one disturbed step carries no more weight than any other. Never negative: a negative growth
    would only mean that the card was warming up."""
    longer = [after - before for before, after in zip(earlier.warm_s, later.warm_s, strict=False)]
    return max(0.0, median(longer) / (later.at - earlier.at))


@dataclass(frozen=True, slots=True)
class TracedSteps:
    """A trace of steps launched in turn; the times of a served step and of one launched in turn, both without the profiler and
    at the position of the trace; and the share of waits, as served."""

    trace: Idle
    num_steps: int
    served_s: float
    in_turn_s: float
    waits: float

    @property
    def busy_us(self) -> float:
        """Busy time per step, in microseconds."""
        return self.trace.span_us * (1 - self.trace.share) / self.num_steps

    @property
    def busy(self) -> float:
        """Busy share of a served step; above 1 if early launches save more than gaps cost."""
        return self.busy_us / (1e6 * self.served_s)

    @property
    def idle(self) -> float:
        return max(0.0, self.waits, 1 - self.busy)

    @property
    def problem(self) -> str:
        """Why the trace does not show how long kernels take; empty if it does."""
        if self.trace.overlap > OVERLAP_MAX:
            return f"{100 * self.trace.overlap:.1f} % of the trace overlaps: its kernels were not launched in turn"
        if self.busy_us > 1e6 * self.in_turn_s:
            step = f"a step in turn takes {1e6 * self.in_turn_s:.0f} without the profiler"
            return f"the kernels of a step take {self.busy_us:.0f} µs in the trace, where {step}: these are not their durations"
        return ""


def measure_idle(run: Callable[[], object], device: torch.device) -> Idle:
    """Run under the profiler. A rehearsal traces CPU operations instead, so that the same code is exercised."""
    on_gpu = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    if on_gpu:
        torch.cuda.synchronize()  # otherwise a step under way would appear in the trace
    with torch.profiler.profile(activities=[activity]) as profiler:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
    return idle_from_trace(events, WORK if on_gpu else ("cpu_op",))


def idle_from_trace(events: list[dict[str, Any]], kinds: tuple[str, ...]) -> Idle:
    """Compute the idle time of a trace from the union of everything that ran, overlapping or not."""
    work = sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"]), e["name"]) for e in events if e.get("cat") in kinds)
    if not work:
        raise RuntimeError(f"the profiler saw none of {', '.join(kinds)}")
    first, end = work[0][0], work[0][1]
    gaps: list[float] = []
    kernel_us: dict[str, float] = {}
    for begin, until, name in work:
        if begin > end:
            gaps.append(begin - end)
        end = max(end, until)
        kernel_us[name] = kernel_us.get(name, 0.0) + until - begin
    span = max(end - first, 1e-9)
    longest = sorted(kernel_us, key=lambda name: -kernel_us[name])[:KERNELS_NAMED]
    top = {name[:60]: kernel_us[name] / span for name in longest}
    long = sum(gap for gap in gaps if gap > LONG_US)
    overlap = sum(kernel_us.values()) - (span - sum(gaps))
    return Idle(sum(gaps) / span, long / span, span, len(work), max(gaps, default=0.0), top, overlap / span)
