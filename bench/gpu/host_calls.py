"""The host thread's cost of a step's calls, depending on what the device does meanwhile: one call of each kind, separately.

`step_parts` divides a step's host time among parts of our code. This measures the calls that they make: on an H200, launching a
step took 616 µs of CPU time; the same Python code takes 28 µs with the driver mocked.

idle      the device has nothing to do, and the host has just been busy
busy      the device computes for some milliseconds, and the host stays awake for half of them, as it does between steps
behind    the same, and a graph was launched just before, as a step's tokens are sent after its graph
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from bench.gpu.context import Context
from bench.gpu.rows import Row
from bench.gpu.targets import HOST_CALLS
from bench.gpu.timing import synchronize
from engine.runner.staging import record

SAMPLES = 9
BUSY_S = 0.004
COUNT = 256  # tokens of a step
GRAPH_KERNELS = 200
GRAPH = f"graph of {GRAPH_KERNELS} kernels"
Call = Callable[[], object]


def measure_calls(context: Context, launch: Call) -> None:
    """`launch` launches one Triton kernel that does nothing. The row's value is the sum of one call of each kind, in µs."""
    size = context.size(4096, 64)
    matrix = torch.randn(size, size, device=context.device).to(context.dtype)
    occupy = _make_busy(context, lambda: torch.mm(matrix, matrix))
    calls = _calls(context, launch)
    situations: dict[str, Call] = {"idle": lambda: None, "busy": occupy}
    if (replay := calls.get(GRAPH)) is not None:
        situations["behind"] = partial(_call_all, occupy, replay)
    times_us: dict[str, dict[str, float]] = {}
    for name, call in calls.items():
        call()
        times_us[name] = {
            situation: 1e6 * median([_cpu_time_s(context, call, make_ready) for _ in range(SAMPLES)])
            for situation, make_ready in situations.items()
        }
    row = Row(name=HOST_CALLS, value=sum(each["busy"] for each in times_us.values()), facts={"us": times_us})
    figures = (f"{name} {' / '.join(f'{us:.0f}' for us in call_times_us.values())}" for name, call_times_us in times_us.items())
    row.note = f"{' / '.join(situations)}: {', '.join(figures)}"
    context.emit(row)


def _calls(context: Context, launch: Call) -> dict[str, Call]:
    on_card = context.device.type == "cuda"
    tokens = torch.zeros(COUNT, dtype=torch.int64, device=context.device)
    pinned = torch.zeros(COUNT, dtype=torch.int64, pin_memory=on_card)
    calls: dict[str, Call] = {
        "copy to the device": lambda: tokens.copy_(pinned, non_blocking=True),
        "copy to the host": lambda: pinned.copy_(tokens, non_blocking=True),
        "operation of torch": lambda: tokens.add_(1),
        "kernel of Triton": launch,
    }
    if on_card:
        event, past_event = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        past_event.record()
        tokens.add_(1)  # a kernel's first launch loads it, which a capture may refuse
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(GRAPH_KERNELS):
                tokens.add_(1)
        calls |= {"event": partial(record, event), "wait for what is over": past_event.synchronize, GRAPH: graph.replay}
    return calls


def _call_all(*calls: Call) -> None:
    for call in calls:
        call()


def _make_busy(context: Context, product: Call) -> Call:
    """Return a call that keeps the device busy for BUSY_S, and the host awake for half of that time."""
    product()
    synchronize(context.device)
    started_s = time.perf_counter()
    product()
    synchronize(context.device)
    repeats = min(200, max(1, round(BUSY_S / (time.perf_counter() - started_s))))

    def occupy() -> None:
        for _ in range(repeats):
            product()
        until_s = time.perf_counter() + BUSY_S / 2
        while time.perf_counter() < until_s:
            pass

    return occupy


def _cpu_time_s(context: Context, call: Call, make_ready: Call) -> float:
    """CPU time of this thread in `call`."""
    make_ready()
    started_s = time.thread_time()
    call()
    elapsed_s = time.thread_time() - started_s
    synchronize(context.device)
    return elapsed_s
