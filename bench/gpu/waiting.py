"""Processor time that a thread spends waiting for the device, which is not work of the host: it waits without sleeping."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from engine.runner.token_return import CudaFetch


@dataclass(slots=True)
class Waited:
    """`cpu_s`: seconds of the thread's clock inside of waits for tokens, of all steps so far."""

    cpu_s: float = 0.0


@contextmanager
def waited() -> Iterator[Waited]:
    """Clock the waits for tokens inside the block, and no other: a buffer that is not free yet holds up the host. Of a wait
    that sleeps, falling asleep and waking are left out too. The clock itself is the host's, less than a microsecond a step."""
    found, wait = Waited(), CudaFetch.wait

    def clocked(fetch: CudaFetch) -> None:
        started_s = time.thread_time()
        try:
            wait(fetch)
        finally:
            found.cpu_s += time.thread_time() - started_s

    with mock.patch.object(CudaFetch, "wait", clocked):
        yield found
