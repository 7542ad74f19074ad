# ruff: noqa: ARG002 - stand-ins have the signatures of what they stand for
"""What a decode step costs the host: the loop, scheduler and slot runner of a GPU engine over a device that answers at once.

Usage: python -m bench.host_step [--steps 600] [--batches 1,64,256]

Everything the host does between two launches is real: planning, slots, staging, booking, tokens to events. Only the step itself
is left out, and copies go to main memory. Times are of the thread's CPU clock, so that other work on the machine does not
count but for what it does to caches; `calibrator_us` is the time of 256 attribute updates just then. A call of that clock adds
about 0.3 microseconds to each part. Phases: `steady` decodes at one batch size; `turnover` replaces a
request in every second step, as 256 requests of 500 tokens do. One JSON row per run is appended to
bench/results/host_step.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Hashable
from typing import Any

import torch

from bench.rows import heading, keep
from engine.loop import Engine
from engine.memory.device import GraphsTaken
from engine.protocol import EngineInfo, GenerationRequest, SamplingParams
from engine.runner.cuda_graphs import Calls
from engine.runner.slot_runner import SlotRunner
from engine.sampling.columns import Chosen, ColumnSampler, Kind
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.scheduler import Scheduler

WARM_STEPS = 60
BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
PROMPT_LEN = 8
DEVICE = torch.device("cpu")


class NoDecoder:
    """A decoder of no layers."""

    greedy_head = None
    batch_invariant = False
    max_verify_group = 1
    kv_caches = [torch.empty(1)]
    attention_shapes: tuple[()] = ()
    rotaries: tuple[()] = ()
    vocab_size = 1
    dtype = None

    def keep_workspaces(self, num_rows: int, max_blocks: int) -> list[Any]:
        return []

    def prepare(self, rows: list[Any]) -> Any:
        class Inputs:
            token_ids = torch.zeros(sum(len(row.token_ids) for row in rows), dtype=torch.int64)

        Inputs.num_outputs = sum(len(row.outputs) for row in rows)  # type: ignore[attr-defined]
        return Inputs

    def forward(self, inputs: Any) -> torch.Tensor:
        return torch.zeros(inputs.num_outputs, 1)

    def logits(self, hidden: torch.Tensor, *, wide: bool = True) -> torch.Tensor:
        return hidden


class NoSampler(ColumnSampler):
    """Everybody says token 0."""

    def choose(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, kind: Kind, masks: torch.Tensor | None = None,
        *, scores_out: torch.Tensor | None = None,
    ) -> Chosen:  # fmt: skip
        return Chosen(torch.zeros(len(slots), dtype=torch.int64), None)


class NoCalls:
    """A replay that takes no time."""

    def is_ready(self, key: Hashable) -> bool:
        return True

    def admits(self, key: Hashable) -> bool:
        return True

    def make_ready(self, key: Hashable, function: Callable[[], None]) -> None: ...

    def run(self, key: Hashable, function: Callable[[], None]) -> None: ...

    @property
    def taken(self) -> GraphsTaken:
        return GraphsTaken()


class NoPlainRunner:
    stage = "run"
    text_model = None

    def move(self, moves: Any) -> None: ...

    def run(self, items: Any) -> Any:
        raise AssertionError("everything here is launched")


class Parts:
    """CPU time spent inside wrapped methods, in this step."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    def wrap(self, holder: Any, name: str, label: str) -> None:
        inner, times = getattr(holder, name), self.times.setdefault(label, [])

        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.thread_time()
            try:
                return inner(*arguments, **named)
            finally:
                times.append(time.thread_time() - started)

        setattr(holder, name, timed)


def make_engine(
    batch: int, *, calls: Calls | None = None, max_model_len: int = MAX_MODEL_LEN, budget: int = 8192
) -> tuple[Engine, Parts]:
    """An engine of `batch` seats, and the times of its parts. `calls`: what runs its captured steps, else nothing. `budget`:
    tokens of a step."""
    limits = SchedulerLimits(
        max_num_seqs=batch, max_num_batched_tokens=budget, max_model_len=max_model_len, block_size=BLOCK_SIZE
    )
    pool = BlockPool(batch * max_model_len // BLOCK_SIZE)
    scheduler = Scheduler(limits, pool, clock=time.monotonic, prefix_cache=PrefixCache(pool, BLOCK_SIZE))
    info = EngineInfo(
        model="none", architecture="None", max_model_len=max_model_len, vocab_size=1 << 17, eos_token_ids=[1],
        block_size=BLOCK_SIZE, num_kv_blocks=pool.num_blocks, dtype="none", device="none", device_name="none", kernels="none",
        max_num_seqs=batch, num_parameters=0, weights_bytes=0, kv_bytes=0, load_s=0.0,
    )  # fmt: skip
    runner: Any = SlotRunner(
        NoPlainRunner(),  # type: ignore[arg-type]
        NoDecoder(),  # type: ignore[arg-type]
        NoSampler(batch, 1, DEVICE),
        None,  # type: ignore[arg-type]
        calls or NoCalls(),
        max_num_seqs=batch,
        max_guesses=0,
        max_blocks=max_model_len // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        device=DEVICE,
    )
    runner._state.host_tables = runner._step.host_sampled = None  # as on a GPU, where the device's memory is not the host's
    engine = Engine(scheduler, runner, info, overlap=runner)
    parts = Parts()
    for holder, name in ((scheduler, "schedule"), (scheduler, "advance"), (scheduler, "settle"), (runner, "plain_reason")):
        parts.wrap(holder, name, name)
    parts.wrap(runner, "launch", "launch")
    assert engine._overlapped is not None
    engine._overlapped._advance = scheduler.advance
    return engine, parts


def submit(engine: Engine, number: int, max_tokens: int) -> None:
    sampling = SamplingParams(seed=number, max_tokens=max_tokens, ignore_eos=True)
    prompt = [number % 1000 + 2] * PROMPT_LEN
    engine.submit(
        GenerationRequest(request_id=str(number), tenant_id=f"t{number % 8}", prompt_token_ids=prompt, sampling=sampling)
    )


def measure(batch: int, phase: str, steps: int) -> dict[str, Any]:
    engine, parts = make_engine(batch)
    lifetime = steps + WARM_STEPS + 100 if phase == "steady" else 2 * batch
    for number in range(batch):
        submit(engine, number, lifetime if phase == "steady" else 2 + 2 * number)
    number = batch
    times: list[float] = []
    gc.collect()
    gc.freeze()
    gc.disable()
    for step in range(WARM_STEPS + steps):
        if step == WARM_STEPS:
            for each in parts.times.values():
                each.clear()
        started = time.thread_time()
        events = engine.step()
        if step >= WARM_STEPS:
            times.append(time.thread_time() - started)
        for _ in range(sum(event.finish_reason is not None for event in events)):
            submit(engine, number, lifetime)
            number += 1
    gc.enable()
    engine.abort_all()
    found: dict[str, Any] = {"calibrator_us": calibrator_us()}
    found |= {"batch": batch, "phase": phase, "step_us_p50": us(times), "step_us_p99": us(times, 0.99)}
    return found | {f"{label}_us_p50": us(each) for label, each in parts.times.items()}


class Plain:
    """Something with an attribute."""

    def __init__(self) -> None:
        self.number = 0


def calibrator_us() -> float:
    """256 plain attribute updates: how fast this machine is at Python just now."""
    things, times = [Plain() for _ in range(256)], []
    for _ in range(400):
        started = time.thread_time()
        for thing in things:
            thing.number += 1
        times.append(time.thread_time() - started)
    return us(times)


def us(times: list[float], share: float = 0.5) -> float:
    return round(1e6 * (statistics.median(times) if share == 0.5 else sorted(times)[int(share * len(times))]), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batches", default="1,64,256")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = [
        measure(int(batch), phase, options.steps) for batch in options.batches.split(",") for phase in ("steady", "turnover")
    ]
    row = {
        **heading("host_step"),
        "torch": torch.__version__,
        "steps": options.steps,
        "results": cells,
    }
    keep(row)
    for cell in cells:
        print(cell)


if __name__ == "__main__":
    main()
