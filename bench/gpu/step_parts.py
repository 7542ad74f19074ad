"""Where a step's host time goes: the thread's CPU time in each part, excluding other parts nested in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from engine.overlap import OverlappedSteps
from engine.runner.cuda_graphs import CudaGraphs, DirectCalls
from engine.runner.slot_runner import SlotRunner
from engine.runner.token_return import CudaFetch, TokenReturn
from engine.scheduling.scheduler import Scheduler
from kernels.device_words import DeviceWords

WAIT = "wait"
PARTS: tuple[tuple[str, Any, str], ...] = (
    ("plan", Scheduler, "schedule"),
    ("book", OverlappedSteps, "launch"),
    ("launch", SlotRunner, "launch"),
    ("write", DeviceWords, "write"),
    ("graph", CudaGraphs, "run"),
    ("graph", DirectCalls, "run"),
    ("return", TokenReturn, "fetch"),
    ("complete", OverlappedSteps, "complete"),
    ("fetch", OverlappedSteps, "collect"),
    ("settle", Scheduler, "settle"),
    (WAIT, CudaFetch, "wait"),
)
"""plan: scheduling the step · book: whether slots can hold its requests, and advancing the scheduler past it · launch: its
inputs, and what is launched besides the graph · write: sending changed slots and blocks, a copy and an operation · graph: the
driver call that launches it · return: the event that returns its tokens · complete: the rest of a step whose masks come late ·
fetch: its tokens, once they have arrived · settle: tokens and events of the previous step · wait: until tokens have arrived,
which is not host work"""
REST = "rest"


@contextmanager
def step_parts() -> Iterator[dict[str, float]]:
    """Yield seconds by part, for all steps inside the block. The clocks themselves take a few microseconds per step."""
    taken_s = dict.fromkeys((label for label, *_ in PARTS), 0.0)
    within_s = [0.0]  # time of nested parts within each part under way, the innermost last

    def timed(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            within_s.append(0.0)
            started_s = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                whole_s = time.thread_time() - started_s
                taken_s[label] += whole_s - within_s.pop()
                within_s[-1] += whole_s

        return run

    with ExitStack() as stack:
        for label, holder, name in PARTS:
            stack.enter_context(mock.patch.object(holder, name, timed(label, getattr(holder, name))))
        yield taken_s
