"""The host's cost of scheduling a step: schedule() and apply() alone, with a device that takes no time. No model, no torch.

Usage: python -m bench.scheduler [--steps 2000] [--phases steady,admission,…]

Grid: running requests × waiting requests × tenants × cached blocks × phases. Each cell gives the medians and 99th percentiles
of schedule() and apply(), and the ratio of schedule() to a calibrator: 256 plain attribute updates, timed alternately with the
cell's steps. `ratios` compares cells that differ from the base cell in one factor with that cell. Garbage collection is off
while a cell is timed; the first 50 steps are not counted. Times are CPU time of the thread, so that other work on the machine
does not count; a call of that clock adds about 0.3 microseconds to each figure. One JSON row per run is appended to
bench/results/scheduler.jsonl.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from dataclasses import dataclass
from itertools import count, cycle, islice, product
from typing import Any

from bench.rows import argument_parser, row_header, save_row
from engine.protocol import Priority, SamplingParams
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.request import Request
from engine.scheduling.scheduled_batch import ScheduledBatch, StepOutput
from engine.scheduling.scheduler import Scheduler

WARM_STEPS = 50
BLOCK_SIZE = 16
CALIBRATOR_UPDATES = 256
SAMPLING = SamplingParams(seed=1)
TOKEN, NO_TOKEN = StepOutput([7]), StepOutput()
PHASES = ("steady", "admission", "finish", "abort", "preemption", "chunked")
GRID: dict[str, tuple[int, ...]] = {
    "running": (1, 64, 256, 1024),
    "waiting": (0, 1000, 100_000),
    "tenants": (1, 100, 10_000),
    "cached": (1000, 100_000, 1_000_000),
}
BASE = {"running": 256, "waiting": 0, "tenants": 1, "cached": 1000}


@dataclass(frozen=True)
class Cell:
    """One point of the grid. `cached`: unowned blocks with cached content, besides the blocks that the requests use."""

    phase: str
    running: int
    waiting: int
    tenants: int
    cached: int


class CellState:
    """A scheduler brought into the state of a cell."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self._ids = count()
        self._long_request: Request | None = None
        spare = cell.running * 300 + 8192
        self.pool = BlockPool(cell.cached + spare)
        limits = SchedulerLimits(
            max_num_seqs=cell.running, max_num_batched_tokens=8192, max_model_len=65536, block_size=BLOCK_SIZE
        )
        self.scheduler = Scheduler(limits, self.pool, clock=lambda: 0.0, prefix_cache=PrefixCache(self.pool, BLOCK_SIZE))
        self._fill_cache()
        for number in range(cell.running):
            self.add(64 + number % BLOCK_SIZE)
        while self.scheduler.accounts.prefilling or self.scheduler.num_waiting:
            self.apply_outputs(self.scheduler.schedule())
        for _ in range(cell.waiting):
            self.add(64)

    def _fill_cache(self) -> None:
        blocks = self.pool.allocate(self.cell.cached)
        for number, block_id in enumerate(blocks):
            self.pool.register(block_id, number.to_bytes(16, "big"))
        self.pool.release(blocks)

    def add(self, num_prompt_tokens: int, priority: Priority = Priority.STANDARD) -> Request:
        number = next(self._ids)
        request = Request(
            request_id=str(number),
            tenant_id=f"tenant {number % self.cell.tenants}",
            sampling=SAMPLING,
            token_ids=[number % 50_000] * num_prompt_tokens,
            num_prompt_tokens=num_prompt_tokens,
            max_total_tokens=num_prompt_tokens + 30_000,
            stop_ids=frozenset(),
            arrived_s=float(number),
            priority=priority,
        )
        self.scheduler.add(request)
        return request

    def apply_outputs(self, batch: ScheduledBatch) -> None:
        self.scheduler.apply(batch, [TOKEN if item.samples else NO_TOKEN for item in batch.items])

    def before_step(self) -> None:
        """Apply the phase's changes between two steps, untimed."""
        phase, running = self.cell.phase, self.scheduler.accounts.running_requests
        if not running:
            return
        if phase == "admission":
            self.scheduler.abort(next(iter(running)))
            self.add(64)
        elif phase == "finish":
            oldest = next(iter(running))
            oldest.max_total_tokens = oldest.num_tokens + 1
            if not self.cell.waiting:
                self.add(64)
        elif phase == "abort":
            self.scheduler.abort(next(iter(running)))
            self.add(64)
            if self.scheduler.num_waiting > 1:
                self.scheduler.abort(next(iter(self.scheduler.waiting())))
        elif phase == "preemption":
            for _ in range(min(8, len(running))):
                self.scheduler.preempt(next(reversed(running)))
        elif phase == "chunked" and not self.scheduler.accounts.prefilling:
            self.scheduler.abort(self._long_request or next(iter(running)))
            self._long_request = self.add(32_768, Priority.INTERACTIVE)


def measure(cell: Cell, steps: int) -> dict[str, Any]:
    state = CellState(cell)
    scheduler = state.scheduler
    updated = list(islice(cycle(scheduler.accounts.running_requests), CALIBRATOR_UPDATES))
    schedule_s: list[float] = []
    apply_s: list[float] = []
    calibrator_s: list[float] = []
    clock = time.thread_time
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for number in range(steps + WARM_STEPS):
            state.before_step()
            started_s = clock()
            batch = scheduler.schedule()
            scheduled_s = clock()
            outputs = [TOKEN if item.samples else NO_TOKEN for item in batch.items]
            ran_s = clock()
            scheduler.apply(batch, outputs)
            applied_s = clock()
            for request in updated:
                request.num_skips += 0
            calibrated_s = clock()
            if number >= WARM_STEPS:
                schedule_s.append(scheduled_s - started_s)
                apply_s.append(applied_s - ran_s)
                calibrator_s.append(calibrated_s - applied_s)
    finally:
        gc.enable()
        gc.unfreeze()
    calibrator = statistics.median(calibrator_s)
    return {
        **vars(cell),
        "schedule_us_p50": _us(statistics.median(schedule_s)),
        "schedule_us_p99": _us(_p99(schedule_s)),
        "apply_us_p50": _us(statistics.median(apply_s)),
        "apply_us_p99": _us(_p99(apply_s)),
        "calibrator_us": _us(calibrator),
        "schedule_to_calibrator": round(statistics.median(schedule_s) / calibrator, 2),
        "preemptions": scheduler.totals.preemptions,
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 2)


def _p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def prefix_match() -> dict[str, float]:
    """A fully cached 32k prompt, matched cold (its block hashes are computed) and again (they are cached)."""
    pool = BlockPool(4096)
    cache = PrefixCache(pool, BLOCK_SIZE)
    cold_s: list[float] = []
    again_s: list[float] = []
    for number in range(30):
        request = Request(
            request_id=str(number),
            tenant_id="tenant",
            sampling=SAMPLING,
            token_ids=list(range(32_768)),
            num_prompt_tokens=32_768,
            max_total_tokens=32_769,
            stop_ids=frozenset(),
            arrived_s=0.0,
        )
        if not number:
            blocks = pool.allocate(2048)
            for block_id, content_hash in zip(blocks, cache.hashes(request, 2048), strict=True):
                pool.register(block_id, content_hash)
            continue
        for samples_s, match in ((cold_s, cache.match), (again_s, cache.match_len)):
            started_s = time.thread_time()
            match(request)
            samples_s.append(time.thread_time() - started_s)
    return {"cold_ms": round(statistics.median(cold_s) * 1e3, 3), "again_us": _us(statistics.median(again_s))}


def cells(phases: list[str]) -> list[Cell]:
    """Vary each factor alone from the base cell, in every phase, and all of them together in steady decode."""
    alone = [Cell(phase, **{**BASE, factor: value}) for phase in phases for factor, values in GRID.items() for value in values]
    together = [Cell("steady", *point) for point in product(*GRID.values())] if "steady" in phases else []
    return list(dict.fromkeys([*alone, *together]))


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Step times relative to the base cell of the same phase, for cells that differ from it in one factor."""
    bases = {row["phase"]: row for row in rows if not _changed_factors(row)}
    found = []
    for row in rows:
        base, changed = bases.get(row["phase"]), _changed_factors(row)
        if base is not None and len(changed) == 1 and changed[0] != "running":
            found.append(
                {
                    "phase": row["phase"],
                    changed[0]: row[changed[0]],
                    "schedule": round(row["schedule_us_p50"] / base["schedule_us_p50"], 2),
                    "step": round(_step_us(row) / _step_us(base), 2),
                }
            )
    return found


def _changed_factors(row: dict[str, Any]) -> list[str]:
    return [factor for factor, value in BASE.items() if row[factor] != value]


def _step_us(row: dict[str, Any]) -> float:
    return float(row["schedule_us_p50"] + row["apply_us_p50"])


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="timed steps of each cell")
    parser.add_argument("--phases", default=",".join(PHASES))
    options = parser.parse_args()
    rows = []
    for cell in cells(options.phases.split(",")):
        rows.append(measure(cell, options.steps))
        print(json.dumps(rows[-1]), flush=True)
    row = {
        **row_header("scheduler"),
        "steps": options.steps,
        "prefix_match_32k": prefix_match(),
        "ratios": ratios(rows),
        "cells": rows,
    }
    save_row(row, options)
    print(json.dumps({key: row[key] for key in ("prefix_match_32k", "ratios")}, indent=1))


if __name__ == "__main__":
    main()
