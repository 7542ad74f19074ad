"""The named points at which processes can be killed, and how that is done.

The code under test is unchanged: a forked child wraps its methods before the appliance starts. Each point counts how often it
is reached; at the planned time the gateway, its engine or both get SIGKILL immediately, in the middle of the call.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import struct
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alembic import command
from sqlalchemy.ext.asyncio import AsyncConnection

import appliance.app
from appliance.base.aio_writer import AioWriter
from appliance.base.db import Database
from appliance.base.journal import Journal
from appliance.metering.ledger import rollups
from appliance.metering.ledger.round import Open, Round, Settle
from appliance.metering.ledger.writer import Ledger
from appliance.metering.limits.saved_levels import LevelSaver
from appliance.serving.bill import Bill
from appliance.serving.engine_client import EngineClient
from appliance.serving.generation import Generation
from appliance.serving.generations import Generations
from appliance.serving.supervisor import Supervisor

LAG_POLL_S = 0.01

# Where a transaction of each kind can be interrupted: its statements are done, COMMIT runs in another thread, or it is durable
# and nobody has been notified.
CUTS = ("before COMMIT", "in COMMIT", "after COMMIT")
SERVING_POINTS = (
    *(f"{kind}: {cut}" for kind in ("pending record", "checkpoint", "settlement") for cut in CUTS),
    "request admitted, not submitted to the engine",
    "request submitted to the engine",
    "first token received",
    "tenth token received",
    "answer ended, reservation not settled",
    "reservation settled, settlement not begun",
    "events settled, rollups not written",
    "rollups written, not committed",
    *(f"limit levels: {cut}" for cut in CUTS),
    "outcome reported to the reader",
    "abort requested",
    "client disconnected",
)
JOURNAL_POINTS = tuple(f"journal write: {cut}" for cut in CUTS)  # on SQLite: where COMMIT is the write that waits
REPLAY_POINTS = tuple(f"journal replay: {cut}" for cut in (*CUTS, "journal not cleared"))
ENGINE_POINTS = (
    "request submitted to the engine",
    "first token received",
    "tenth token received",
    "checkpoint: before COMMIT",
    "pending record: after COMMIT",
    "abort requested",
)
START_POINTS = (
    "migration: before COMMIT",
    "migration: after COMMIT",
    *(f"epoch start: {cut}" for cut in CUTS),
    *(f"recovery: {cut}" for cut in CUTS),
    "before the ledger starts",
    "engine process started",
)
STOP_POINTS = (
    "drain begun",
    "generations stopped",
    "ledger stopped",
    "epoch end: before COMMIT",
    "epoch end: after COMMIT",
)
FIRST_START_POINTS = (
    "migration: before COMMIT",
    "bootstrap: before COMMIT",
    "migration: after COMMIT",
    "bootstrap: after COMMIT",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is killed when: the `nth` time that `point` is reached after `after_s` seconds. `delay_us`: time into a COMMIT."""

    point: str
    target: str
    nth: int = 1
    after_s: float = 0.0
    delay_us: int = 0


class Notes:
    """What a gateway records in a shared memory map: delays, the pid of its engine, and whether the planned kill happened."""

    _LAYOUT = struct.Struct("<ddQQ")

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(self._LAYOUT.size)
            self._map = mmap.mmap(file.fileno(), self._LAYOUT.size)
        self.read()

    def read(self) -> Notes:
        """Read the current figures and return these notes."""
        self.lag_s, self.round_s, self.struck, self.engine_pid = self._LAYOUT.unpack_from(self._map)
        return self

    def write(self) -> None:
        """Write the figures."""
        self._LAYOUT.pack_into(self._map, 0, self.lag_s, self.round_s, self.struck, self.engine_pid)


class Killer:
    """Counts how often points are reached and kills the planned processes."""

    def __init__(self, plan: Plan | None, notes: Notes) -> None:
        self.notes = notes
        self._plan = plan
        self._counts: Counter[str] = Counter()
        self._begins_s = time.monotonic() + (plan.after_s if plan is not None else 0.0)

    def reached(self, point: str) -> None:
        """Kill the planned processes if they are due at `point`."""
        if self._is_due(point):
            self._strike()

    def reached_commit(self, kind: str) -> None:
        """The statements of a transaction are done and COMMIT comes next."""
        self.reached(f"{kind}: before COMMIT")
        if self._plan is not None and self._is_due(f"{kind}: in COMMIT"):
            threading.Thread(target=self._strike_in, args=(self._plan.delay_us / 1e6,), daemon=True).start()

    def _is_due(self, point: str) -> bool:
        if self._plan is None or self._plan.point != point or time.monotonic() < self._begins_s:
            return False
        self._counts[point] += 1
        return self._counts[point] == self._plan.nth

    def _strike_in(self, delay_s: float) -> None:
        end_s = time.perf_counter() + delay_s
        while time.perf_counter() < end_s:
            pass
        self._strike()

    def _strike(self) -> None:
        assert self._plan is not None
        self.notes.struck = 1
        self.notes.write()
        if self._plan.target in ("engine", "both"):
            kill(self.notes.engine_pid)
        if self._plan.target in ("gateway", "both"):
            kill(os.getpid())


def kill(pid: int) -> None:
    """Kill a process; 0 stands for none."""
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


_kinds: ContextVar[tuple[str, ...]] = ContextVar("kinds", default=())


def arm(killer: Killer) -> None:
    """Wrap the appliance of this process so that `killer` hears of every point."""
    _wrap_transactions(killer)
    _wrap_journal(killer)
    _wrap_start(killer)
    _wrap_serving(killer)
    _wrap_stop(killer)


def watch_lag(notes: Notes) -> None:
    """Record from now on the longest iteration of the event loop."""

    async def watch() -> None:
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(LAG_POLL_S)
            lag_s = time.monotonic() - began_s - LAG_POLL_S
            if lag_s > notes.lag_s:
                notes.lag_s = lag_s
                notes.write()

    task = asyncio.get_running_loop().create_task(watch(), name="lag watch")
    _kept.append(task)


_kept: list[asyncio.Task[None]] = []


def _wrap_transactions(killer: Killer) -> None:
    Database.writing = _cut(killer, Database.writing)  # type: ignore[method-assign,assignment]
    batch_write = Database.batch_write

    async def cut_batch_write(self: Database, fn: Any, *args: Any, **options: Any) -> Any:
        kinds = _kinds.get()

        def cut(connection: Any) -> Any:
            result = fn(connection, *args, **options)
            for kind in kinds:
                killer.reached_commit(kind)
            return result

        result = await batch_write(self, cut)
        for kind in kinds:
            killer.reached(f"{kind}: after COMMIT")
        return result

    Database.batch_write = cut_batch_write  # type: ignore[method-assign]
    transaction = Round._transaction

    async def named(self: Round, operations: Any, checkpoints: Any) -> None:
        kinds = ["pending record"] if any(isinstance(operation, Open) for operation in operations) else []
        kinds += ["checkpoint"] if checkpoints else []
        kinds += ["settlement"] if any(isinstance(operation, Settle) for operation in operations) else []
        began_s, token = time.monotonic(), _kinds.set(tuple(kinds))
        try:
            await transaction(self, operations, checkpoints)
        finally:
            _kinds.reset(token)
        if time.monotonic() - began_s > killer.notes.round_s:
            killer.notes.round_s = time.monotonic() - began_s
            killer.notes.write()

    Round._transaction = named  # type: ignore[method-assign]


def _wrap_journal(killer: Killer) -> None:
    write, clear = Journal._write, Journal.clear

    def cut(self: Journal, batch: Any) -> None:
        killer.reached_commit("journal write")
        write(self, batch)
        killer.reached("journal write: after COMMIT")

    def before_clearing(self: Journal) -> None:
        killer.reached("journal replay: journal not cleared")
        clear(self)

    Journal._write = cut  # type: ignore[method-assign]
    Journal.clear = before_clearing  # type: ignore[method-assign]
    by_kernel = AioWriter.write

    def cut_by_kernel(self: AioWriter, index: int, data: bytes, offset: int, on_end: Callable[[bool], None]) -> None:
        def ended(is_durable: bool) -> None:
            killer.reached("journal write: after COMMIT")
            on_end(is_durable)

        killer.reached_commit("journal write")
        by_kernel(self, index, data, offset, ended)

    AioWriter.write = cut_by_kernel  # type: ignore[method-assign]


def _cut(killer: Killer, writing: Callable[[Database], Any]) -> Callable[[Database], Any]:
    @asynccontextmanager
    async def cut(database: Database) -> AsyncIterator[AsyncConnection]:
        kinds = _kinds.get()
        async with writing(database) as connection:
            yield connection
            for kind in kinds:
                killer.reached_commit(kind)
        for kind in kinds:
            killer.reached(f"{kind}: after COMMIT")

    return cut


def _naming(function: Callable[..., Any], *kinds: str) -> Callable[..., Any]:
    """Return the coroutine function with its transactions named."""

    async def named(*args: Any, **options: Any) -> Any:
        token = _kinds.set(kinds)
        try:
            return await function(*args, **options)
        finally:
            _kinds.reset(token)

    return named


def _wrap_start(killer: Killer) -> None:
    app: Any = appliance.app
    app.begin_epoch = _naming(app.begin_epoch, "epoch start")
    app.replay = _naming(app.replay, "journal replay")
    app.recover = _naming(app.recover, "recovery")
    app.end_epoch = _naming(app.end_epoch, "epoch end")
    app.bootstrap = _naming(app.bootstrap, "bootstrap")
    _before(killer, Ledger, "start", "before the ledger starts")
    spawn = Supervisor._spawn

    async def spawned(self: Supervisor, theirs: Any) -> Any:
        process = await spawn(self, theirs)
        killer.notes.engine_pid = process.pid
        killer.notes.write()
        killer.reached("engine process started")
        return process

    Supervisor._spawn = spawned  # type: ignore[method-assign]
    _wrap_migration(killer, app)


def _wrap_migration(killer: Killer, app: Any) -> None:
    alembic: Any = command
    upgrade, command_upgrade = app.upgrade, command.upgrade

    def cut(*args: Any, **options: Any) -> None:
        command_upgrade(*args, **options)
        killer.reached("migration: before COMMIT")

    def after(url: str, *args: Any) -> None:
        upgrade(url, *args)
        killer.reached("migration: after COMMIT")

    alembic.upgrade = cut
    app.upgrade = after


def _wrap_serving(killer: Killer) -> None:
    _before(killer, EngineClient, "submit", "request admitted, not submitted to the engine")
    _after(killer, EngineClient, "_flush", "request submitted to the engine")
    _before(killer, Bill, "end_reservation", "answer ended, reservation not settled")
    _after(killer, Bill, "end_reservation", "reservation settled, settlement not begun")
    _after_await(killer, Generation, "_settle", "outcome reported to the reader")
    _before(killer, rollups, "add", "events settled, rollups not written")
    _after(killer, rollups, "add", "rollups written, not committed")
    LevelSaver.save = _naming(LevelSaver.save, "limit levels")  # type: ignore[method-assign]
    end_early = Generation.end_early

    def left(self: Generation, reason: str, *args: Any, **options: Any) -> None:
        end_early(self, reason, *args, **options)
        if self.live.state != "finished":
            killer.reached("abort requested" if reason == "aborted" else "client disconnected")

    Generation.end_early = left  # type: ignore[method-assign]
    count = Generation._apply_counts

    def counted(self: Generation, event: Any) -> None:
        count(self, event)
        if event.token_ids:
            killer.reached({1: "first token received", 10: "tenth token received"}.get(event.num_output_tokens, ""))

    Generation._apply_counts = counted  # type: ignore[method-assign]


def _wrap_stop(killer: Killer) -> None:
    drain = Generations.drain

    async def drained(self: Generations, timeout_s: float) -> bool:
        self.draining = True
        killer.reached("drain begun")
        return await drain(self, timeout_s)

    Generations.drain = drained  # type: ignore[method-assign]
    _after_await(killer, Generations, "stop", "generations stopped")
    _after_await(killer, Ledger, "stop", "ledger stopped")


def _before(killer: Killer, owner: Any, name: str, point: str) -> None:
    function = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        killer.reached(point)
        return function(*args, **options)

    setattr(owner, name, wrapped)


def _after(killer: Killer, owner: Any, name: str, point: str) -> None:
    function = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        killer.reached(point)
        return result

    setattr(owner, name, wrapped)


def _after_await(killer: Killer, owner: Any, name: str, point: str) -> None:
    function = getattr(owner, name)

    async def wrapped(*args: Any, **options: Any) -> Any:
        result = await function(*args, **options)
        killer.reached(point)
        return result

    setattr(owner, name, wrapped)
