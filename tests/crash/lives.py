"""Kills the gateway, its engine or both, again and again over the same database, and checks the ledger after each start.

    python -m tests.crash.lives --times 200 --database sqlite [--seed N] [--save FILE]

A life is one process of the gateway: it starts with the database that the last one left, serves clients of several tenants, and
gets SIGKILL at a named point (`points.py`) or at a random time. After LIVES_PER_DATABASE lives a new database is used.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from appliance.base.db import Database
from appliance.base.migrations import downgrade
from bench.rows import append_row, row_header
from tests.crash import points
from tests.crash.checks import Evidence, LedgerCheck, Tally
from tests.crash.fork_server import ForkServer, Gateway, StartOptions
from tests.crash.load import MODEL, Load
from tests.crash.points import Notes, Plan, kill
from tests.support.databases import Cluster, postgresql_binaries, running_cluster
from tests.support.raw_http import ConnectionLost, RawHttpClient
from tests.support.served_model import make_hollow_model

LIVES_PER_DATABASE = 40
ADMIN_TOKEN = "gha_token-of-the-tests"
STEP_S = 0.008
STRIKE_DEADLINE_S = 4.0
POLL_S = 0.01
RANDOM = "at random"
OLDEST = "0001"  # an interrupted migration starts from a filled database of this version
FIRST_STARTS = 2  # so many lives of each database are killed during its first start
ORDERLY_S = 0.3
CHECKPOINT_INTERVALS_S = (0.2, 0.2, 0.2, 0.75)  # the last is the default; the others make a life short
NTH_MAX = {
    "bootstrap": 3,
    "recovery": 1,
    "journal replay": 1,
    "checkpoint": 3,
    "limit levels": 1,
    "abort requested": 2,
    "client disconnected": 3,
}
WARM_UP_S_MAX = 0.9
COMMIT_US_MAX = 3000
FINDINGS_KEPT = 200
ENGINE_GONE = "engine_unavailable"
TENANTS: dict[str, dict[str, Any]] = {
    "alice": {},
    "bob": {"limits": {"tokens_per_minute": 60_000, "concurrent_requests": 3}},
    "charlie": {"limits": {"requests_per_minute": 600, "tokens_per_day": 10_000_000, "monthly_budget": 10_000_000}},
}
PRICE = {"model": MODEL, "prompt": 3_000_000, "cached_prompt": 700_000, "completion": 11_000_001, "batch_percent": 50}


@dataclass(frozen=True, slots=True)
class Crash:
    """Where one life is to be killed: the phase (starting, serving, stopping), the point, and which processes."""

    phase: str
    point: str
    target: str

    @property
    def name(self) -> str:
        """Return its name in the table of results."""
        return f"{self.phase}: {self.point}"


def all_crashes(rng: random.Random, database: str) -> Iterator[Crash]:
    """Yield every crash in random order, endlessly; one in three under load is followed by one during a start."""
    in_journal, in_replay = (points.JOURNAL_POINTS, points.REPLAY_POINTS) if database == "sqlite" else ((), ())
    under_load = (*points.SERVING_POINTS, *in_journal)
    serving = [Crash("serving", point, target) for point in under_load for target in ("gateway", "both")]
    serving += [Crash("serving", point, "engine") for point in points.ENGINE_POINTS]
    serving += [Crash("serving", RANDOM, target) for target in ("gateway", "both", "engine") for _ in range(3)]
    serving += [Crash("stopping", point, "gateway") for point in points.STOP_POINTS]
    starting = [Crash("starting", point, "gateway") for point in (*points.START_POINTS, *in_replay, RANDOM)]
    while True:
        rng.shuffle(serving)
        rng.shuffle(starting)
        for number, crash in enumerate(serving):
            yield crash
            if number % 3 == 0:
                yield starting[number // 3 % len(starting)]


@dataclass(slots=True)
class Files:
    """SQLite databases, each in a folder of its own."""

    folder: Path
    count: int = 0

    def create(self) -> str:
        """Return the URL of a file that does not exist yet."""
        self.count += 1
        return f"sqlite:///{self.folder / f'deployment-{self.count}.db'}"


@dataclass(slots=True)
class Deployment:
    """One database with its data folder, the keys in it, and what was observed since the last check."""

    url: str
    data_dir: Path
    keys: dict[str, str] = field(default_factory=dict)
    checked_id: int = 0
    evidence: Evidence = field(default_factory=Evidence)


@dataclass(frozen=True, slots=True)
class Life:
    """One process of the gateway with its start options and notes."""

    options: StartOptions
    notes: Notes
    gateway: Gateway


@dataclass(slots=True)
class Result:
    """Counts and findings of all lives."""

    lives: int = 0
    planned: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    targets: Counter[str] = field(default_factory=Counter)
    checks: int = 0
    told_of_engine_failure: int = 0
    findings: list[str] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)


class Lives:
    """Runs lives one after another."""

    def __init__(
        self,
        fork_server: ForkServer,
        databases: Cluster | Files,
        folder: Path,
        *,
        seed: int,
        on_life: Callable[[Result], object],
    ) -> None:
        self.result = Result()
        self._fork_server = fork_server
        self._databases = databases
        self._folder = folder
        self._rng = random.Random(seed)
        self._on_life = on_life
        self._model = make_hollow_model(folder / MODEL)
        self._num_starts = 0

    async def run(self, times: int, order: Iterator[Crash]) -> Result:
        """Run `times` lives that are killed, and on each database a last one that shuts down normally."""
        firsts = cycle(Crash("first start", point, "gateway") for point in points.FIRST_START_POINTS)
        while self.result.lives < times:
            deployment = Deployment(self._databases.create(), self._folder / f"data-{self._num_starts}")
            count = min(LIVES_PER_DATABASE, times - self.result.lives)
            for number in range(count):
                await self._live(deployment, next(firsts) if number < FIRST_STARTS else next(order))
                self._on_life(self.result)
            await self._run_with_normal_shutdown(deployment)
        return self.result

    async def _live(self, deployment: Deployment, crash: Crash) -> None:
        self.result.lives += 1
        self.result.planned[crash.name] += 1
        self.result.targets[crash.target] += 1
        if crash.phase == "starting" and crash.point.startswith("migration"):
            await asyncio.to_thread(downgrade, deployment.url, OLDEST)
            deployment.evidence.was_older = True
        life = await self._start(deployment, self._plan(crash))
        if crash.phase == "starting" and crash.point == RANDOM:
            await asyncio.sleep(self._rng.uniform(0.0, 0.2))
            life.gateway.signal(signal.SIGKILL)
        if await life.gateway.listening():
            await self._check(deployment)
            if await self._prepare(deployment, life.gateway):
                await self._serve(deployment, crash, life)
        await life.gateway.exited
        self.result.struck[crash.name] += bool(life.notes.read().struck) or crash.point == RANDOM
        deployment.evidence.add(life.options, life.notes, engine_killed=crash.target != "gateway")

    async def _run_with_normal_shutdown(self, deployment: Deployment) -> None:
        """Start, check, serve and shut down normally: nothing may be left to recover."""
        life = await self._start(deployment, None)
        if not await life.gateway.listening():
            self._find(f"an orderly start failed: {self._log_end()}")
            return
        await self._check(deployment)
        await self._prepare(deployment, life.gateway)
        load = self._load(deployment, life.gateway)
        await asyncio.sleep(ORDERLY_S)
        await self._shut_down(life.gateway)
        deployment.evidence.seen += await load.finish()
        deployment.evidence.add(life.options, life.notes.read(), engine_killed=False)
        await self._check(deployment, running=False)

    def _plan(self, crash: Crash) -> Plan | None:
        if crash.point == RANDOM:
            return None
        nth = self._rng.randint(1, NTH_MAX.get(crash.point.partition(":")[0], 12 if crash.phase == "serving" else 1))
        after_s = self._rng.uniform(0.0, WARM_UP_S_MAX) if crash.phase == "serving" else 0.0
        delay_us = self._rng.randint(0, COMMIT_US_MAX)
        return Plan(point=crash.point, target=crash.target, nth=nth, after_s=after_s, delay_us=delay_us)

    async def _start(self, deployment: Deployment, plan: Plan | None) -> Life:
        self._num_starts += 1
        folder = self._folder / f"life-{self._num_starts}"
        folder.mkdir()
        settings = {
            "data_dir": str(deployment.data_dir),
            "database_url": deployment.url,
            "port": 0,
            "models": [str(self._model)],
            "device": "cpu",
            "admin_token": ADMIN_TOKEN,
            "admin_password": "a password of tests",
        }
        options = StartOptions(
            settings=settings,
            plan=plan,
            records=str(folder),
            notes=str(folder / "notes"),
            log=str(self._folder / "log"),
            step_s=STEP_S,
            checkpoint_interval_s=self._rng.choice(CHECKPOINT_INTERVALS_S),
            recovered_per_transaction=self._rng.choice((2, 500)),
        )
        return Life(options, Notes(folder / "notes"), await self._fork_server.start(options))

    async def _check(self, deployment: Deployment, *, running: bool = True) -> None:
        """Check the database after the start and before any request is served."""
        async with Database.open(deployment.url) as database:
            check = LedgerCheck(database, deployment.evidence, self.result.tally)
            deployment.checked_id = await check.run(deployment.checked_id)
            await check.check_invariants(deployment.url, running=running)
        for finding in check.findings:
            self._find(finding)
        self.result.checks += 1
        for folder in deployment.evidence.records:
            shutil.rmtree(folder)
        deployment.evidence = Evidence()

    async def _prepare(self, deployment: Deployment, gateway: Gateway) -> bool:
        """Wait for the engine, and create price, tenants and keys once per database; return whether they exist."""
        assert gateway.announcement is not None
        wire = RawHttpClient(gateway.announcement["port"], ADMIN_TOKEN)
        keys = {}
        try:
            await _ready(wire)
            if deployment.keys:
                return True
            await _call(wire, "/admin/v1/prices", PRICE)
            for name, fields in TENANTS.items():
                tenant = await _call(wire, "/admin/v1/tenants", {"name": f"{name} {self._num_starts}", **fields})
                keys[name] = (await _call(wire, f"/admin/v1/tenants/{tenant['id']}/keys", {"name": name}))["key"]
        except ConnectionLost:
            return False
        finally:
            wire.abort()
        deployment.keys = keys
        return True

    def _load(self, deployment: Deployment, gateway: Gateway) -> Load:
        assert gateway.announcement is not None
        rng = random.Random(self._rng.random())
        load = Load(port=gateway.announcement["port"], keys=deployment.keys, admin_token=ADMIN_TOKEN, rng=rng)
        load.start()
        return load

    async def _serve(self, deployment: Deployment, crash: Crash, life: Life) -> None:
        """Put load on the appliance until its planned end."""
        load = self._load(deployment, life.gateway)
        if crash.phase == "stopping":
            await asyncio.sleep(self._rng.uniform(0.2, 0.6))
            life.gateway.signal(signal.SIGTERM)
        if crash.point == RANDOM or crash.phase == "starting":
            await asyncio.sleep(self._rng.uniform(0.1, 1.2))
            if crash.target in ("engine", "both"):
                kill(life.notes.read().engine_pid)
        else:
            await self._wait_until_killed(life)
        if crash.target == "engine":
            await self._check_streams_of_killed_engine(load, life.gateway)
        life.gateway.signal(signal.SIGKILL)
        deployment.evidence.seen += await load.finish()

    async def _wait_until_killed(self, life: Life) -> None:
        """Wait until the planned kill has happened or the deadline has passed."""
        end_s = time.monotonic() + STRIKE_DEADLINE_S
        while not life.gateway.exited.done() and not life.notes.read().struck and time.monotonic() < end_s:
            await asyncio.wait({life.gateway.exited}, timeout=POLL_S)

    async def _check_streams_of_killed_engine(self, load: Load, gateway: Gateway) -> None:
        """Check that every stream of the killed engine ends with an error while the gateway runs on."""
        for seen in await load.finish():
            if seen.status == 200 and not seen.ended and seen.manner != "leave":
                self._find(f"{seen.request_id} ({seen.manner}) had neither an end nor an error")
            self.result.told_of_engine_failure += seen.error == ENGINE_GONE
        if self._rng.random() < 0.5:
            await self._shut_down(gateway)

    async def _shut_down(self, gateway: Gateway) -> None:
        gateway.signal(signal.SIGTERM)
        await gateway.exited
        if gateway.exit_status != 0:
            self._find(f"an orderly stop ended with {gateway.exit_status}: {self._log_end()}")

    def _find(self, text: str) -> None:
        self.result.findings.append(f"life {self.result.lives}: {text}")

    def _log_end(self) -> str:
        return (self._folder / "log").read_text("utf-8", "replace")[-2000:]


async def _ready(wire: RawHttpClient) -> None:
    """Wait until the appliance is ready."""
    while True:
        head = await wire.send("GET", "/health/ready")
        await wire.content(head)
        if head.status == 200:
            return
        await asyncio.sleep(POLL_S)


async def _call(wire: RawHttpClient, path: str, body: dict[str, Any]) -> Any:
    head = await wire.send("POST", path, body)
    answer = json.loads(await wire.content(head))
    assert head.status in (200, 201), answer
    return answer


def live(
    times: int,
    cluster: Cluster | None,
    seed: int,
    *,
    order: Iterator[Crash] | None = None,
    on_life: Callable[[Result], object] = id,
) -> dict[str, Any]:
    """Run `times` lives on databases of the PostgreSQL server `cluster`, or on SQLite files; return the row of results."""
    began_s = time.monotonic()
    kind = "sqlite" if cluster is None else "postgresql"
    with tempfile.TemporaryDirectory(prefix="gatehouse-lives-") as name, ForkServer() as fork_server:
        folder = Path(name)
        lives = Lives(fork_server, cluster or Files(folder), folder, seed=seed, on_life=on_life)
        result = asyncio.run(lives.run(times, order or all_crashes(random.Random(seed), kind)))
    return row_of(result, kind, seed, time.monotonic() - began_s)


def row_of(result: Result, kind: str, seed: int, took_s: float) -> dict[str, Any]:
    """Return the row of results of all lives."""
    tally = result.tally
    return {
        **row_header("crash_lives"),
        "database": kind,
        "seed": seed,
        "lives": result.lives,
        "killed": dict(sorted(result.targets.items())),
        "checks_after_a_start": result.checks,
        "points": {name: [result.struck[name], count] for name, count in sorted(result.planned.items())},
        "events": dict(sorted(tally.events.items())),
        "events_of_batch_work": tally.batch_events,
        "answers_seen_by_clients": dict(sorted(tally.seen.items())),
        "streams_told_of_an_engines_death": result.told_of_engine_failure,
        "events_settled_after_an_engines_death": tally.failed_with_engine,
        "tokens_billed": tally.tokens,
        "tokens_unbilled": tally.unbilled_tokens,
        "tokens_unbilled_max": tally.unbilled_tokens_max,
        "unbilled_s_max": round(tally.unbilled_s_max, 3),
        "findings": len(result.findings),
        "first_findings": result.findings[:FINDINGS_KEPT],
        "took_s": round(took_s, 1),
    }


def main() -> None:
    """Run the lives, print table and row; exit with 1 if there are findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, help="add the row to this file")
    options = parser.parse_args()

    def progress(result: Result) -> None:
        sys.stderr.write(f"\r{result.lives}/{options.times} lives, {result.checks} checks, {len(result.findings)} findings ")
        sys.stderr.flush()

    with ExitStack() as stack:
        cluster = None
        if options.database == "postgresql":
            binaries = postgresql_binaries() or parser.error("no PostgreSQL binaries on this machine")
            cluster = stack.enter_context(running_cluster(binaries))
        row = live(options.times, cluster, options.seed, on_life=progress)
    sys.stderr.write("\n")
    for name, (struck, planned) in row["points"].items():
        sys.stdout.write(f"{name:<58} {struck:>4} of {planned}\n")
    sys.stdout.write(json.dumps(row, indent=1) + "\n")
    if options.save:
        command = f"python -m tests.crash.lives --times {options.times} --database {options.database} --seed {options.seed}"
        append_row(options.save, {**row, "command": command})
    raise SystemExit(1 if row["findings"] else 0)


if __name__ == "__main__":
    main()
