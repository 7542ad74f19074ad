"""Samples the state of the appliance and distributes snapshots to subscribers. A slow subscriber misses samples, never blocks.

It receives reader functions, so that it depends on neither the serving layer nor the database.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from datetime import datetime

from appliance.base.background import Background, repeat
from appliance.base.call_thread import CallThread
from appliance.base.clock import Clock
from appliance.telemetry.gpu import GpuReading
from appliance.telemetry.host import HostReading
from appliance.telemetry.readings import DatabaseReading, EngineReading, ProcessReading, SystemSnapshot

SAMPLE_INTERVAL_S = 1.0
HISTORY_SAMPLES = 120
GPU_ANSWER_S = 2.0
GPU_SILENT = "the GPU driver does not answer"


class TooManySubscribers(Exception):
    """The sampler already has the maximum number of subscribers."""


class _Slot:
    """A mailbox for the latest snapshot: a newer one replaces it."""

    def __init__(self) -> None:
        self._snapshot: SystemSnapshot | None = None
        self._filled = asyncio.Event()

    def put(self, snapshot: SystemSnapshot) -> None:
        self._snapshot = snapshot
        self._filled.set()

    async def take(self) -> SystemSnapshot:
        await self._filled.wait()
        self._filled.clear()
        assert self._snapshot is not None
        return self._snapshot


class SystemSampler:
    """Samples once a second in one task; read `latest` and `history`, or `subscribe`.

    `started_at` is the start of the gateway, in which it runs.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        host: Callable[[], HostReading],
        gpus: Callable[[], list[GpuReading]],
        gpu_error: Callable[[], str | None],
        engines: Callable[[], Sequence[EngineReading]],
        started_at: datetime,
        database: Callable[[], Awaitable[DatabaseReading]],
        interval_s: float = SAMPLE_INTERVAL_S,
    ) -> None:
        self._clock = clock
        self._host = host
        self._gpus = gpus
        self._gpu_error = gpu_error
        self._gpu_thread: CallThread | None = None
        self._gpu_reading: asyncio.Task[list[GpuReading]] | None = None
        self._engines = engines
        self._gateway = ProcessReading(role="gateway", pid=os.getpid(), model=None, started_at=started_at, restarts=0)
        self._database = database
        self._subscribers: set[_Slot] = set()
        self._sampling = Background("system sampler", lambda: repeat(self.sample, interval_s, failure="system sample failed"))
        self._latest: SystemSnapshot | None = None
        self.history: deque[SystemSnapshot] = deque(maxlen=HISTORY_SAMPLES)

    @property
    def latest(self) -> SystemSnapshot:
        """Return the latest snapshot. Raises RuntimeError before `start` has returned."""
        if self._latest is None:
            raise RuntimeError("the sampler has not been started")
        return self._latest

    async def start(self) -> None:
        """Take the first sample, then continue in the background."""
        await self.sample()
        self._sampling.start()

    async def stop(self) -> None:
        """Stop the task. Open subscriptions end when their readers are cancelled."""
        await self._sampling.stop()
        reading, self._gpu_reading = self._gpu_reading, None
        if reading is not None:
            reading.cancel()
        thread, self._gpu_thread = self._gpu_thread, None
        if thread is not None:
            thread.end(wait=False)

    async def sample(self) -> SystemSnapshot:
        """Take a snapshot now, store it and pass it to every subscriber."""
        snapshot = await self._read()
        self._latest = snapshot
        self.history.append(snapshot)
        for slot in self._subscribers:
            slot.put(snapshot)
        return snapshot

    async def subscribe(self, *, at_most: int | None = None) -> AsyncGenerator[SystemSnapshot, None]:
        """Yield the latest snapshot at once, then each newer one.

        Raises TooManySubscribers if there are `at_most` subscribers already; None disables the check.
        """
        if at_most is not None and len(self._subscribers) >= at_most:
            raise TooManySubscribers(f"at most {at_most} live streams can be open")
        slot = _Slot()
        if self._latest is not None:
            slot.put(self._latest)
        self._subscribers.add(slot)
        try:
            while True:
                yield await slot.take()
        finally:
            self._subscribers.discard(slot)

    async def _read(self) -> SystemSnapshot:
        gpus, gpu_error = await self._read_gpus()
        engines = list(self._engines())
        return SystemSnapshot(
            at=self._clock.now(),
            engines=engines,
            gpus=gpus,
            gpu_error=gpu_error,
            host=self._host(),
            database=await self._database(),
            processes=[self._gateway, *(_engine_process(engine) for engine in engines)],
            requests_running=sum(engine.status_or_zeros.num_running for engine in engines),
            requests_waiting=sum(engine.status_or_zeros.num_waiting for engine in engines),
            requests_waiting_for_limits=sum(engine.requests_waiting_for_limits for engine in engines),
            tokens_per_second=sum(engine.tokens_per_second for engine in engines),
        )

    async def _read_gpus(self) -> tuple[list[GpuReading], str | None]:
        """Return the readings of all GPUs, and why there are none.

        If a GPU is lost, its driver may never answer. Snapshots wait GPU_ANSWER_S for it once, and not again until it has
        answered.
        """
        reading, timeout_s = self._gpu_reading, 0.0
        if reading is None:
            self._gpu_thread = self._gpu_thread or CallThread("gpu readings")
            reading, timeout_s = asyncio.create_task(self._gpu_thread.call(self._gpus)), GPU_ANSWER_S
            self._gpu_reading = reading
        await asyncio.wait({reading}, timeout=timeout_s)
        if not reading.done():
            return [], GPU_SILENT
        self._gpu_reading = None
        return reading.result(), self._gpu_error()


def _engine_process(engine: EngineReading) -> ProcessReading:
    return ProcessReading(
        role="engine", pid=engine.pid, model=engine.model, started_at=engine.started_at, restarts=engine.restarts
    )
