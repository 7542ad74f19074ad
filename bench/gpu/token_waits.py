"""CPU time that a thread spends waiting for the device: it waits without sleeping, but waiting is not host work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from engine.runner.token_return import CudaFetch


@dataclass(slots=True)
class TokenWaits:
    """`cpu_s`: the thread's CPU seconds in waits for tokens, over all steps so far."""

    cpu_s: float = 0.0


@contextmanager
def time_token_waits() -> Iterator[TokenWaits]:
    """Time the waits for tokens inside the block, and no others: waiting for a buffer that is not yet free counts as host time.
    For a wait that sleeps, this includes falling asleep and waking. The clock's own time, less than a microsecond per step,
    counts as host time."""
    waits, wait = TokenWaits(), CudaFetch.wait

    def timed_wait(fetch: CudaFetch) -> None:
        started_s = time.thread_time()
        try:
            wait(fetch)
        finally:
            waits.cpu_s += time.thread_time() - started_s

    with mock.patch.object(CudaFetch, "wait", timed_wait):
        yield waits
