"""Kills the appliance, its engine or both, again and again over the same books, and checks the books after each start.

    python -m tests.crash.lives --times 200 --database sqlite [--seed N] [--save FILE]

A life is one process of the gateway: it starts over what the last one left, serves clients of several tenants, and is ended by
SIGKILL at a named point (`points.py`) or at a random moment. Every LIVES_PER_DATABASE lives begin with an empty database.
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
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol

from appliance.base.db import Database
from appliance.base.migrations import downgrade
from bench.rows import append_row, row_header
from tests.crash import points
from tests.crash.checks import Evidence, Examination, Tally
from tests.crash.load import MODEL, Load
from tests.crash.nursery import Birth, Gateway, Nursery
from tests.crash.points import Notes, Plan, kill
from tests.support.databases import postgresql_binaries, running_cluster
from tests.support.raw_http import ConnectionLost, RawHttpClient
from tests.support.served_model import make_hollow_model

LIVES_PER_DATABASE = 40
ADMIN_TOKEN = "gha_token-of-the-tests"
STEP_S = 0.008
STRIKE_DEADLINE_S = 4.0
POLL_S = 0.01
RANDOM = "at random"
OLDEST = "0001"  # the migration that is cut short begins with a filled database of this version
FIRST_STARTS = 2  # of each database end before anything is there
ORDERLY_S = 0.3
CHECKPOINT_INTERVALS_S = (0.2, 0.2, 0.2, 0.75)  # the last is the product's; the others make a life short
NTH_MAX = {
    "bootstrap": 3,
    "recovery": 1,
    "journal to tables": 1,
    "checkpoint": 3,
    "levels of limits": 1,
    "abort asked": 2,
    "client left": 3,
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
class Death:
    """How one life is to end: while it starts, serves or stops."""

    phase: str
    point: str
    target: str

    @property
    def name(self) -> str:
        """Return what the table calls it."""
        return f"{self.phase}: {self.point}"


def deaths(dice: random.Random, database: str) -> Iterator[Death]:
    """Yield every death in random order, again and again; one in the start follows one under load."""
    in_journal, in_replay = (points.JOURNAL_POINTS, points.REPLAY_POINTS) if database == "sqlite" else ((), ())
    under_load = (*points.SERVING_POINTS, *in_journal)
    serving = [Death("serving", point, target) for point in under_load for target in ("gateway", "both")]
    serving += [Death("serving", point, "engine") for point in points.ENGINE_POINTS]
    serving += [Death("serving", RANDOM, target) for target in ("gateway", "both", "engine") for _ in range(3)]
    serving += [Death("stopping", point, "gateway") for point in points.STOP_POINTS]
    starting = [Death("starting", point, "gateway") for point in (*points.START_POINTS, *in_replay, RANDOM)]
    while True:
        dice.shuffle(serving)
        dice.shuffle(starting)
        for number, death in enumerate(serving):
            yield death
            if number % 3 == 0:
                yield starting[number // 3 % len(starting)]


class Server(Protocol):
    """Makes empty databases."""

    def create(self) -> str:
        """Return the URL of a new one."""
        ...


@dataclass(slots=True)
class Files:
    """SQLite databases, each in a folder of its own."""

    folder: Path
    count: int = 0

    def create(self) -> str:
        """Return the URL of a file that is not there yet."""
        self.count += 1
        return f"sqlite:///{self.folder / f'books-{self.count}.db'}"


@dataclass(slots=True)
class Books:
    """One database, the data folder that goes with it, and what is known of it."""

    url: str
    data_dir: Path
    keys: dict[str, str] = field(default_factory=dict)
    checked_id: int = 0
    evidence: Evidence = field(default_factory=Evidence)


@dataclass(frozen=True, slots=True)
class Life:
    """One process of the gateway."""

    birth: Birth
    notes: Notes
    gateway: Gateway


@dataclass(slots=True)
class Result:
    """What came of all lives."""

    lives: int = 0
    planned: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    targets: Counter[str] = field(default_factory=Counter)
    checks: int = 0
    told_of_death: int = 0
    findings: list[str] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)


class Lives:
    """Lives one after another. `run` returns what came of them."""

    def __init__(
        self, nursery: Nursery, server: Server, folder: Path, *, seed: int, on_life: Callable[[Result], object]
    ) -> None:
        self.result = Result()
        self._nursery = nursery
        self._server = server
        self._folder = folder
        self._dice = random.Random(seed)
        self._on_life = on_life
        self._model = make_hollow_model(folder / MODEL)
        self._births = 0

    async def run(self, times: int, order: Iterator[Death]) -> Result:
        """Live `times` lives that end by force, and on each database a last one that ends in order."""
        firsts = cycle(Death("first start", point, "gateway") for point in points.FIRST_START_POINTS)
        while self.result.lives < times:
            books = Books(self._server.create(), self._folder / f"data-{self._births}")
            count = min(LIVES_PER_DATABASE, times - self.result.lives)
            for number in range(count):
                await self._live(books, next(firsts) if number < FIRST_STARTS else next(order))
                self._on_life(self.result)
            await self._live_in_order(books)
        return self.result

    async def _live(self, books: Books, death: Death) -> None:
        self.result.lives += 1
        self.result.planned[death.name] += 1
        self.result.targets[death.target] += 1
        if death.phase == "starting" and death.point.startswith("migration"):
            await asyncio.to_thread(downgrade, books.url, OLDEST)
            books.evidence.was_older = True
        life = await self._bear(books, self._plan(death))
        if death.phase == "starting" and death.point == RANDOM:
            await asyncio.sleep(self._dice.uniform(0.0, 0.2))
            life.gateway.signal(signal.SIGKILL)
        if await life.gateway.listening():
            await self._examine(books)
            if await self._settle_down(books, life.gateway):
                await self._serve(books, death, life)
        await life.gateway.dead
        self.result.struck[death.name] += bool(life.notes.read().struck) or death.point == RANDOM
        books.evidence.add(life.birth, life.notes, engine_killed=death.target != "gateway")

    async def _live_in_order(self, books: Books) -> None:
        """Start, check, serve, and stop as one should: nothing may be left to recover."""
        life = await self._bear(books, None)
        if not await life.gateway.listening():
            self._find(f"an orderly start failed: {self._log_end()}")
            return
        await self._examine(books)
        await self._settle_down(books, life.gateway)
        load = self._load(books, life.gateway)
        await asyncio.sleep(ORDERLY_S)
        await self._stop_in_order(life.gateway)
        books.evidence.seen += await load.finish()
        books.evidence.add(life.birth, life.notes.read(), engine_killed=False)
        await self._examine(books, running=False)

    def _plan(self, death: Death) -> Plan | None:
        if death.point == RANDOM:
            return None
        nth = self._dice.randint(1, NTH_MAX.get(death.point.partition(":")[0], 12 if death.phase == "serving" else 1))
        after_s = self._dice.uniform(0.0, WARM_UP_S_MAX) if death.phase == "serving" else 0.0
        delay_us = self._dice.randint(0, COMMIT_US_MAX)
        return Plan(point=death.point, target=death.target, nth=nth, after_s=after_s, delay_us=delay_us)

    async def _bear(self, books: Books, plan: Plan | None) -> Life:
        self._births += 1
        folder = self._folder / f"life-{self._births}"
        folder.mkdir()
        settings = {
            "data_dir": str(books.data_dir),
            "database_url": books.url,
            "port": 0,
            "models": [str(self._model)],
            "device": "cpu",
            "admin_token": ADMIN_TOKEN,
            "admin_password": "a password of tests",
        }
        birth = Birth(
            settings=settings,
            plan=plan,
            truths=str(folder),
            notes=str(folder / "notes"),
            log=str(self._folder / "log"),
            step_s=STEP_S,
            checkpoint_interval_s=self._dice.choice(CHECKPOINT_INTERVALS_S),
            recovered_per_transaction=self._dice.choice((2, 500)),
        )
        return Life(birth, Notes(folder / "notes"), await self._nursery.bear(birth))

    async def _examine(self, books: Books, *, running: bool = True) -> None:
        """Check the books as the start has left them, before anybody is served."""
        async with Database.open(books.url) as database:
            examination = Examination(database, books.evidence, self.result.tally)
            books.checked_id = await examination.run(books.checked_id)
            await examination.prove(books.url, running=running)
        for finding in examination.findings:
            self._find(finding)
        self.result.checks += 1
        for folder in books.evidence.truths:
            shutil.rmtree(folder)
        books.evidence = Evidence()

    async def _settle_down(self, books: Books, gateway: Gateway) -> bool:
        """Wait for the engine, and make price, tenants and keys once per database; return whether they are there."""
        assert gateway.told is not None
        wire = RawHttpClient(gateway.told["port"], ADMIN_TOKEN)
        keys = {}
        try:
            await _ready(wire)
            if books.keys:
                return True
            await _call(wire, "/admin/v1/prices", PRICE)
            for name, fields in TENANTS.items():
                tenant = await _call(wire, "/admin/v1/tenants", {"name": f"{name} {self._births}", **fields})
                keys[name] = (await _call(wire, f"/admin/v1/tenants/{tenant['id']}/keys", {"name": name}))["key"]
        except ConnectionLost:
            return False
        finally:
            wire.abort()
        books.keys = keys
        return True

    def _load(self, books: Books, gateway: Gateway) -> Load:
        assert gateway.told is not None
        dice = random.Random(self._dice.random())
        load = Load(port=gateway.told["port"], keys=books.keys, admin_token=ADMIN_TOKEN, dice=dice)
        load.start()
        return load

    async def _serve(self, books: Books, death: Death, life: Life) -> None:
        """Put load on the appliance until the end that was meant for it."""
        load = self._load(books, life.gateway)
        if death.phase == "stopping":
            await asyncio.sleep(self._dice.uniform(0.2, 0.6))
            life.gateway.signal(signal.SIGTERM)
        if death.point == RANDOM or death.phase == "starting":
            await asyncio.sleep(self._dice.uniform(0.1, 1.2))
            if death.target in ("engine", "both"):
                kill(life.notes.read().engine_pid)
        else:
            await self._struck(life)
        if death.target == "engine":
            await self._outlive_engine(load, life.gateway)
        life.gateway.signal(signal.SIGKILL)
        books.evidence.seen += await load.finish()

    async def _struck(self, life: Life) -> None:
        """Return when the planned blow has fallen, or the deadline has passed."""
        end_s = time.monotonic() + STRIKE_DEADLINE_S
        while not life.gateway.dead.done() and not life.notes.read().struck and time.monotonic() < end_s:
            await asyncio.wait({life.gateway.dead}, timeout=POLL_S)

    async def _outlive_engine(self, load: Load, gateway: Gateway) -> None:
        """The gateway lives: every stream of the dead engine must come to an end that says so."""
        for seen in await load.finish():
            if seen.status == 200 and not seen.ended and seen.manner != "leave":
                self._find(f"{seen.request_id} ({seen.manner}) had neither an end nor an error")
            self.result.told_of_death += seen.error == ENGINE_GONE
        if self._dice.random() < 0.5:
            await self._stop_in_order(gateway)

    async def _stop_in_order(self, gateway: Gateway) -> None:
        gateway.signal(signal.SIGTERM)
        await gateway.dead
        if gateway.exit_status != 0:
            self._find(f"an orderly stop ended with {gateway.exit_status}: {self._log_end()}")

    def _find(self, text: str) -> None:
        self.result.findings.append(f"life {self.result.lives}: {text}")

    def _log_end(self) -> str:
        return (self._folder / "log").read_text("utf-8", "replace")[-2000:]


async def _ready(wire: RawHttpClient) -> None:
    """Return when a request would be answered."""
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


@contextmanager
def database_server(kind: str, folder: Path) -> Iterator[Server]:
    """Yield what makes empty databases of `kind`."""
    if kind == "sqlite":
        yield Files(folder)
        return
    binaries = postgresql_binaries()
    if binaries is None:
        raise SystemExit("no PostgreSQL binaries on this machine")
    with running_cluster(binaries) as cluster:
        yield cluster


def live(
    times: int, kind: str, seed: int, *, order: Iterator[Death] | None = None, on_life: Callable[[Result], object] = id
) -> dict[str, Any]:
    """Live `times` lives on databases of `kind` and return the row of figures."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gatehouse-lives-") as name, Nursery() as nursery:
        folder = Path(name)
        with database_server(kind, folder) as server:
            lives = Lives(nursery, server, folder, seed=seed, on_life=on_life)
            result = asyncio.run(lives.run(times, order or deaths(random.Random(seed), kind)))
    return row_of(result, kind, seed, time.monotonic() - began_s)


def row_of(result: Result, kind: str, seed: int, took_s: float) -> dict[str, Any]:
    """Return the figures of all lives."""
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
        "streams_told_of_an_engines_death": result.told_of_death,
        "events_settled_after_an_engines_death": tally.died_with_engine,
        "tokens_billed": tally.tokens,
        "tokens_unbilled": tally.unbilled_tokens,
        "tokens_unbilled_max": tally.unbilled_tokens_max,
        "unbilled_s_max": round(tally.unbilled_s_max, 3),
        "findings": len(result.findings),
        "first_findings": result.findings[:FINDINGS_KEPT],
        "took_s": round(took_s, 1),
    }


def main() -> None:
    """Live, print the table and the row; exit with 1 when anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, help="add the row to this file")
    options = parser.parse_args()

    def progress(result: Result) -> None:
        sys.stderr.write(f"\r{result.lives}/{options.times} lives, {result.checks} checks, {len(result.findings)} findings ")
        sys.stderr.flush()

    row = live(options.times, options.database, options.seed, on_life=progress)
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
