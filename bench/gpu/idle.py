"""How much of a stretch of steps the GPU did nothing, from torch's profiler: what no kernel and no copy covers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LONG_US = 5.0
"""Gaps above it are waits for the host; those below lie between two kernels of a graph."""


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
