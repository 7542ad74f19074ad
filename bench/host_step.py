# ruff: noqa: ARG002 - stand-ins have the signatures of what they stand for
"""The host's cost of a decode step: loop, scheduler and slot runner of a GPU engine, with a device that answers at once.

Usage: python -m bench.host_step [--steps 600] [--batches 1,64,256]

Everything that the host does between two launches is real: planning, slots, staging, booking, turning tokens into events. Only
the step itself is left out, and copies go to main memory. A `turn` is all the work of the thread in the engine's process:
reading requests, the step, the status, and writing the frame with its events to the socket; `decode` is the time that the
gateway takes to read that frame. Times come from the thread's CPU clock, so that other work on the machine affects them only
through the caches; `calibrator_us` is the time of 256 attribute updates at that moment. Each call of the clock adds about 0.3
microseconds to a part. Phases: `steady` decodes at one batch size; `turnover` replaces a request in every second step, as
happens with 256 requests of 500 tokens. Prompts differ in length, so that their blocks do not all fill up at once. One JSON row
per run is appended to bench/results/host_step.jsonl.
"""

from __future__ import annotations

import gc
import itertools
import socket
import statistics
import time
from collections.abc import Callable, Hashable
from contextlib import closing, suppress
from functools import partial
from typing import Any

import torch

from bench.rows import argument_parser, row_header, save_row
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.masks import GrammarMasks
from engine.grammar.queue import GrammarQueue, LazyCompiler
from engine.loop import Engine
from engine.main import serve
from engine.protocol import EngineFrame, EngineInfo, GatewayFrame, GenerationRequest, SamplingParams
from engine.runner.cuda_graphs import Calls, DirectCalls
from engine.runner.slot_runner import SlotRunner
from engine.runner.slot_steps import SlotSteps
from engine.runner.slots import slot_words
from engine.sampling.columns import ColumnSampler, Kind, SampledColumns
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.scheduler import Scheduler
from engine.transport import FrameSocket, PeerClosed, decode_engine_frame

WARM_STEPS = 60
BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
PROMPT_LEN = 8
VOCAB_SIZE = 1 << 17
CHUNK_ROWS = 960  # rows of the largest captured step with chunks, as for Llama-3.1-8B
DEVICE = torch.device("cpu")


class NoDecoder:
    """A decoder without layers."""

    greedy_head = None
    batch_invariant = False
    max_verify_group = 1
    kv_caches = [torch.empty(1)]
    attention_shapes: tuple[()] = ()
    rotaries: tuple[()] = ()
    vocab_size = 1
    dtype = None
    device = DEVICE

    def allocate_workspaces(self, num_rows: int, max_blocks: int) -> None: ...

    def forward_spans(self, rows: list[Any], unknown: Any = None) -> torch.Tensor:
        return torch.zeros(sum(len(row.outputs) for row in rows), 1)

    def logits(self, hidden: torch.Tensor, *, wide: bool = True) -> torch.Tensor:
        return hidden


class NoSampler(ColumnSampler):
    """Every request gets token 0."""

    def choose(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, kind: Kind, masks: torch.Tensor | None = None,
        *, scores_out: torch.Tensor | None = None,
    ) -> SampledColumns:  # fmt: skip
        return SampledColumns(torch.zeros(len(slots), dtype=torch.int64), None)


class NoCalls(DirectCalls):
    """Replays that take no time."""

    def run(self, key: Hashable, function: Callable[[], None]) -> None: ...


class NoPlainRunner:
    stage = "run"
    masks = None

    def move(self, moves: Any) -> None: ...

    def run(self, items: Any) -> Any:
        raise AssertionError("everything here is launched")


class PartTimes:
    """CPU time of each call of the wrapped methods, in seconds, by label."""

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


def no_grammars() -> GrammarQueue:
    """A grammar queue that is never used: no request asks for structured output."""

    def compiler() -> GrammarCompiler:
        raise AssertionError("nothing is compiled here")

    return GrammarQueue(LazyCompiler(compiler), GrammarMasks(2))


def engine_without_model(limits: SchedulerLimits, num_blocks: int, runner: Any) -> tuple[Engine, Scheduler]:
    """An engine over `runner`, which computes nothing, and its scheduler."""
    pool = BlockPool(num_blocks)
    prefix_cache = PrefixCache(pool, limits.block_size)
    scheduler = Scheduler(limits, pool, clock=time.monotonic, prefix_cache=prefix_cache)
    info = EngineInfo(
        model="none", architecture="None", max_model_len=limits.max_model_len, vocab_size=VOCAB_SIZE, eos_token_ids=[1],
        block_size=limits.block_size, num_kv_blocks=num_blocks, dtype="none", device="none", device_name="none",
        kernels="none", max_num_seqs=limits.max_num_seqs, num_parameters=0, weights_bytes=0, kv_bytes=0, load_s=0.0,
    )  # fmt: skip
    return Engine(scheduler, runner, info, no_grammars()), scheduler


def make_engine(
    batch: int, *, calls: Calls | None = None, max_model_len: int = MAX_MODEL_LEN, budget: int = 8192
) -> tuple[Engine, PartTimes]:
    """An engine of `batch` seats, and the times of its parts. `calls` runs its captured steps; by default they do nothing.
    `budget`: the most tokens in a step."""
    limits = SchedulerLimits(
        max_num_seqs=batch, max_num_batched_tokens=budget, max_model_len=max_model_len, block_size=BLOCK_SIZE
    )
    steps: Any = SlotSteps(
        NoDecoder(),  # type: ignore[arg-type]
        NoSampler(batch, 1, DEVICE, make_words=partial(slot_words, num_slots=batch, max_blocks=limits.max_blocks)),
        calls or NoCalls(),
        limits,
        max_draft_tokens=0,
        chunk_rows=CHUNK_ROWS,
    )
    steps.chunks._step._hidden = torch.zeros(batch, 1)  # no decoder computes it
    steps.decodes.step.host_sampled = None  # as on a GPU, whose memory the host cannot read
    steps.state.words.on_host = None
    runner: Any = SlotRunner(NoPlainRunner(), steps)  # type: ignore[arg-type]
    engine, scheduler = engine_without_model(limits, batch * max_model_len // BLOCK_SIZE, runner)
    parts = PartTimes()
    for name in ("schedule", "advance", "settle"):
        parts.wrap(scheduler, name, name)
    for name in ("plain_reason", "launch"):
        parts.wrap(runner, name, name)
    assert engine._overlapped is not None
    engine._overlapped._advance = scheduler.advance  # the engine holds the method from before it was wrapped
    return engine, parts


def submit(engine: Engine, number: int, max_tokens: int) -> None:
    engine.submit(make_request(number, max_tokens))


def make_request(number: int, max_tokens: int) -> GenerationRequest:
    """A request whose id is as long as those that the gateway assigns."""
    return GenerationRequest(
        request_id=f"req_{number:032x}",
        tenant_id=f"t{number % 8}",
        prompt_token_ids=[number % 1000 + 2] * (PROMPT_LEN + number % BLOCK_SIZE),
        sampling=SamplingParams(seed=number, max_tokens=max_tokens, ignore_eos=True),
    )


class LoopbackSocket:
    """The engine's end of its socket together with the gateway's: whatever the engine sends is read at once, and a request that
    ends is replaced; neither is timed. `turns` are CPU times between calls of `receive`, without the warm-up steps."""

    def __init__(self, steps: int, parts: PartTimes, next_request: Callable[[], GenerationRequest]) -> None:
        ours, theirs = socket.socketpair()
        self._engine, self._gateway = FrameSocket(ours), FrameSocket(theirs)
        self._steps = steps
        self._parts = parts
        self._next_request = next_request
        self._started: float | None = None
        self._num_turns = 0
        self.turns: list[float] = []
        self.decoding: list[float] = []
        self.num_bytes: list[int] = []

    def receive(self, timeout_s: float) -> list[bytes]:
        """Return the frames that the gateway sent. Raises `PeerClosed` after the last step."""
        ended = time.thread_time()
        if self._started is not None and self._num_turns > WARM_STEPS:
            self.turns.append(ended - self._started)
        elif self._num_turns == WARM_STEPS:
            for each in self._parts.times.values():
                each.clear()
        for body in self._gateway.receive(0.0):
            self._read(body)
        if len(self.turns) == self._steps:
            raise PeerClosed("the bench is over")
        self._num_turns += 1
        self._started = time.thread_time()
        return self._engine.receive(timeout_s)

    def send(self, frame: EngineFrame) -> None:
        self._engine.send(frame)

    def close(self) -> None:
        self._engine.close()
        self._gateway.close()

    def _read(self, body: bytes) -> None:
        started = time.thread_time()
        frame = decode_engine_frame(body)
        if self._num_turns > WARM_STEPS:
            self.decoding.append(time.thread_time() - started)
            self.num_bytes.append(len(body))
        ended = sum(event.finish_reason is not None for event in frame.events)
        if ended:
            self._gateway.send(GatewayFrame(submit=[self._next_request() for _ in range(ended)]))


def measure(batch: int, phase: str, steps: int) -> dict[str, Any]:
    engine, parts = make_engine(batch)
    lifetime = steps + WARM_STEPS + 100 if phase == "steady" else 2 * batch
    for number in range(batch):
        submit(engine, number, lifetime if phase == "steady" else 2 + 2 * number)
    request_numbers = itertools.count(batch)
    parts.wrap(engine, "step_in_columns", "step")
    loopback = LoopbackSocket(steps, parts, lambda: make_request(next(request_numbers), lifetime))
    gc.collect()
    gc.freeze()
    gc.disable()
    with closing(loopback), suppress(PeerClosed):
        serve(engine, loopback)  # type: ignore[arg-type]
    gc.enable()
    row: dict[str, Any] = {"calibrator_us": calibrator_us(), "batch": batch, "phase": phase}
    for label, times in (("turn", loopback.turns), ("step", parts.times.pop("step"))):
        row |= {f"{label}_us_p50": us(times), f"{label}_us_p99": us(times, 0.99), f"{label}_us_mean": us_mean(times)}
    row |= {"decode_us_p50": us(loopback.decoding), "frame_bytes_p50": statistics.median(loopback.num_bytes)}
    return row | {f"{label}_us_p50": us(each) for label, each in parts.times.items()}


class AttributeHolder:
    """An object with an attribute."""

    def __init__(self) -> None:
        self.number = 0


def calibrator_us() -> float:
    """Time of 256 plain attribute updates: how fast this machine runs Python at the moment."""
    holders, times = [AttributeHolder() for _ in range(256)], []
    for _ in range(400):
        started = time.thread_time()
        for holder in holders:
            holder.number += 1
        times.append(time.thread_time() - started)
    return us(times)


def us_mean(times: list[float]) -> float:
    return round(1e6 * statistics.fmean(times), 1)


def us(times: list[float], share: float = 0.5) -> float:
    return round(1e6 * (statistics.median(times) if share == 0.5 else sorted(times)[int(share * len(times))]), 1)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batches", default="1,64,256")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = [
        measure(int(batch), phase, options.steps) for batch in options.batches.split(",") for phase in ("steady", "turnover")
    ]
    for cell in cells:
        print(cell)
    save_row({**row_header("host_step"), "torch": torch.__version__, "steps": options.steps, "results": cells}, options)


if __name__ == "__main__":
    main()
