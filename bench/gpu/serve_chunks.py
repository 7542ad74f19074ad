"""The time that a graph saves in a step with a prompt chunk: the same forward pass, captured and launched kernel by kernel.
Their results are compared too."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from bench.gpu.context import Context
from bench.gpu.rows import Row
from bench.gpu.targets import chunk_row
from bench.gpu.timing import synchronize
from engine.loop import Engine
from engine.runner.slot_timing import SlotTiming
from engine.runner.token_spans import TokenSpan

SAMPLES = 15
DIFFERENCE_MAX = 0.2
"""Maximum norm of the difference between the two hidden states, over the norm of the expected ones. Products of other sizes
round differently: by a hundredth through four layers in 16 bits, by a few hundredths through 32. Wrong states are unrelated to
the right ones, so their difference is as large as the states themselves."""


def measure_chunk(context: Context, engine: Engine, size: int) -> None:
    """Run a prompt chunk through all layers, alternately captured and launched. It writes its keys and values to blocks that no
    request holds any more. Raises RuntimeError if steps with such a chunk have no graph."""
    steps: Any = engine.runner.steps  # type: ignore[attr-defined]
    length, block_size = context.size(size, 5), engine.info.block_size
    rows = [TokenSpan([0] * length, 0, range(-(-length // block_size)), (length - 1,))]
    served = SlotTiming(steps).chunks if context.device.type == "cpu" else steps.chunks.run_for_timing
    runs: dict[str, Callable[[], torch.Tensor | None]] = {
        "captured": partial(served, rows),
        "one by one": partial(steps.target.forward_spans, rows),
    }
    times_us: dict[str, list[float]] = {f"{label}{what}": [] for label in runs for what in ("", ", host")}
    hidden_states: dict[str, torch.Tensor] = {}
    with torch.inference_mode():
        for _ in range(1 + context.size(SAMPLES, 2)):  # the first is the warm-up
            for label, run in runs.items():
                synchronize(context.device)
                started_s, host_s = time.perf_counter(), time.thread_time()
                hidden = run()
                if hidden is None:
                    raise RuntimeError(f"a step with a chunk of {length} tokens has no graph: {steps.chunks.failure}")
                times_us[f"{label}, host"].append(1e6 * (time.thread_time() - host_s))
                synchronize(context.device)
                times_us[label].append(1e6 * (time.perf_counter() - started_s))
                hidden_states[label] = hidden.float().clone()
    us = {name: median(samples[1:]) for name, samples in times_us.items()}
    row = Row(name=chunk_row(size), value=us["one by one"] / us["captured"], facts={"us": us})
    row.note = ", ".join(f"{name} {time_us:.0f} µs" for name, time_us in us.items())
    difference = _difference(hidden_states["captured"], hidden_states["one by one"])
    row.facts["difference"] = difference
    if not difference <= DIFFERENCE_MAX:
        row.error = f"a captured chunk gives a wrong result: the relative difference is {difference:.3g}"
    context.emit(row)


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))
