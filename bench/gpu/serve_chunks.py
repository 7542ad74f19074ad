"""What a graph saves a step with a chunk of a prompt: the same pass captured and launched kernel by kernel."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from bench.gpu.context import Context
from bench.gpu.rows import Row
from bench.gpu.targets import chunk_of
from bench.gpu.timing import synchronize
from engine.loop import Engine
from engine.runner.input_rows import InputRow
from engine.runner.slot_timing import SlotTiming

SAMPLES = 15


def chunk_ways(context: Context, engine: Engine, size: int) -> None:
    """A chunk of a prompt through all layers, both ways by turns. What it leaves in the cache is in blocks that nobody holds
    any more. Raises RuntimeError where steps with such a chunk have no graph."""
    steps: Any = engine.runner.steps  # type: ignore[attr-defined]
    length, block_size = context.size(size, 5), engine.info.block_size
    rows = [InputRow([0] * length, 0, range(-(-length // block_size)), (length - 1,))]
    served = SlotTiming(steps).chunks if context.device.type == "cpu" else steps.chunks.run_for_timing
    ways: dict[str, Callable[[], object]] = {
        "captured": partial(served, rows),
        "one by one": partial(steps.target.pass_over, rows),
    }
    taken: dict[str, list[float]] = {f"{way}{what}": [] for way in ways for what in ("", ", host")}
    with torch.inference_mode():
        for _ in range(1 + context.size(SAMPLES, 2)):  # of which the first warms up
            for way, run in ways.items():
                synchronize(context.device)
                started_s, host_s = time.perf_counter(), time.thread_time()
                if run() is None:
                    raise RuntimeError(f"a step with a chunk of {length} tokens has no graph")
                taken[f"{way}, host"].append(1e6 * (time.thread_time() - host_s))
                synchronize(context.device)
                taken[way].append(1e6 * (time.perf_counter() - started_s))
    us = {name: median(samples[1:]) for name, samples in taken.items()}
    row = Row(name=chunk_of(size), value=us["one by one"] / us["captured"], facts={"us": us})
    row.note = ", ".join(f"{name} {taken_us:.0f} µs" for name, taken_us in us.items())
    context.emit(row)
