"""How fast the usage API and the console answer over a ledger of a million events, on SQLite and on PostgreSQL.

The events are of TENANTS tenants with KEYS keys each and three models, over the last DAYS days; requests of the same number
stand beside them. They are written past the ledger's writer, in its form, and their sums are built by `rollups.rebuild`, which
is timed, too. Then the whole application answers in this process, without engines: each question QUESTIONS times, after one
that is not counted. Nothing else of the machine is kept still: the load stands in the row, and beside the time of an answer
what this process worked for it (SQLite's work is in it, PostgreSQL's is not).

    python -m bench.million_rows [--events 1000000] [--database sqlite]
                             prints one row per database and adds it to bench/results/
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import httpx
from sqlalchemy import insert, text

from appliance.api.auth import SESSION_COOKIES
from appliance.app import Appliance, create_app
from appliance.base import counters, db
from appliance.base.db import Database
from appliance.base.logging import configure_logging
from appliance.base.settings import load_settings
from appliance.base.tables import requests, usage_events
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger import rollups
from appliance.metering.ledger.recovery import begin_epoch
from appliance.serving.services import Services
from appliance.tenancy.access import WHOLE_BOX
from tests.support.databases import postgresql_binaries, running_cluster

RESULTS = Path(__file__).parent / "results" / "million_rows.jsonl"
TENANTS, KEYS, DAYS = 50, 2, 90
MODELS = ("small", "medium", "large")
QUESTIONS = 15
GOAL_MS = 200
_BATCH = 20_000


async def fill(services: Services, count: int) -> tuple[str, str]:
    """Write `count` events and their requests; return the id of one tenant and of one of its keys."""
    owners = []
    for number in range(TENANTS):
        tenant = await services.tenants.create(name=f"tenant {number}", access=WHOLE_BOX)
        for _ in range(KEYS):
            key, _secret = await services.keys.create(tenant.id, name="key", access=WHOLE_BOX)
            owners.append((tenant.id, key.id))
    prices = {}
    for model in MODELS:
        price = await services.prices.add(model=model, currency="EUR", prompt=150_000, cached_prompt=15_000, completion=600_000)
        prices[model] = price.id
    epoch_id = await begin_epoch(services.db, services.clock, "bench")
    numbers, step = random.Random(1), timedelta(days=DAYS) / count
    start = services.clock.now() - timedelta(days=DAYS)
    for begin in range(0, count, _BATCH):
        rows = [
            _event(number, start + number * step, numbers, owners, prices, epoch_id)
            for number in range(begin, min(begin + _BATCH, count))
        ]
        async with services.db.writing() as connection:
            await connection.execute(insert(usage_events), rows)
            await connection.execute(insert(requests), [_request(row) for row in rows])
    async with services.db.writing() as connection:
        await counters.take(connection, counters.POSTING, count)
    return owners[0]


def _event(
    number: int,
    moment: datetime,
    numbers: random.Random,
    owners: list[tuple[str, str]],
    prices: dict[str, str],
    epoch_id: str,
) -> dict[str, Any]:
    tenant_id, key_id = owners[min(int(numbers.expovariate(0.05)), len(owners) - 1)]  # few use much, many use little
    model, prompt, completion = numbers.choice(MODELS), numbers.randrange(1, 4000), numbers.randrange(1, 800)
    cached = numbers.randrange(prompt)
    return {
        "request_id": f"req_{number:026d}",
        "tenant_id": tenant_id,
        "key_id": key_id,
        "epoch_id": epoch_id,
        "model": model,
        "endpoint": "/v1/chat/completions",
        "kind": "usage",
        "status": "posted",
        "finish_reason": "stop",
        "reserved_tokens": prompt + 256,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "completion_tokens": completion,
        "estimated": False,
        "price_id": prices[model],
        "cost_picos": (prompt - cached) * 150_000 + cached * 15_000 + completion * 600_000,
        "currency": "EUR",
        "billing_day": moment.date(),
        "posting": number + 1,
        "admitted_at": moment,
        "settled_at": moment + timedelta(seconds=2),
    }


def _request(event: dict[str, Any]) -> dict[str, Any]:
    same = ("tenant_id", "key_id", "model", "endpoint", "prompt_tokens", "cached_tokens", "completion_tokens", "finish_reason")
    return {
        **{name: event[name] for name in (*same, "admitted_at")},
        "id": event["request_id"],
        "stream": True,
        "kv_blocks": 10,
        "preemptions": 0,
        "ttft_us": 100_000,
        "finished_at": event["settled_at"],
    }


def questions(now: datetime, tenant_id: str, key_id: str) -> dict[str, str]:
    """Return what is asked, by name."""
    day, month = now - timedelta(days=1), now - timedelta(days=30)
    api = "/admin/v1/usage?"
    return {
        "usage of 30 days": api,
        "usage of 30 days by tenant": f"{api}group_by=tenant",
        "usage of 30 days by tenant, key and model": f"{api}group_by=tenant,key,model",
        "usage of 90 days by model": f"{api}group_by=model&start={_iso(now - timedelta(days=90))}",
        "usage of 30 days of one tenant by key": f"{api}group_by=key&tenant_id={tenant_id}",
        "usage of 30 days by hour": f"{api}bucket=hour&start={_iso(month)}",
        "usage of 7 days by hour and tenant": f"{api}bucket=hour&group_by=tenant&start={_iso(now - timedelta(days=7))}",
        "usage of a day by minute and model": f"{api}bucket=minute&group_by=model&start={_iso(day)}",
        "costs of 30 days by tenant": "/admin/v1/costs?group_by=tenant",
        "ledger, newest first": "/admin/v1/ledger?order=desc",
        "ledger of one key": f"/admin/v1/ledger?key_id={key_id}",
        "requests": "/admin/v1/requests",
        "organization usage": f"/v1/organization/usage/completions?start_time={int(month.timestamp())}&limit=31",
        "console usage": "/usage",
        "console usage by key": "/usage?group=key",
        "console usage of one tenant": f"/usage?tenant={tenant_id}",
        "console usage of today": "/usage?period=today",
        "console overview": "/",
        "console tenants": "/tenants",
        "console tenant": f"/tenants/{tenant_id}",
        "console requests": "/requests",
        "console invoices": "/invoices",
    }


def _iso(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


async def ask(client: httpx.AsyncClient, path: str) -> list[tuple[float, float]]:
    """Return the milliseconds of each answer but the first, and those that this process worked for it."""
    samples = []
    for _ in range(QUESTIONS + 1):
        began_s, worked_s = time.perf_counter(), time.process_time()
        answer = await client.get(path)
        samples.append(((time.perf_counter() - began_s) * 1000, (time.process_time() - worked_s) * 1000))
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:300]}")
    return samples[1:]


async def measure(url: str, folder: Path, count: int) -> dict[str, Any]:
    """Fill the database at `url`, ask everything, and return the row."""
    settings = load_settings(options={"data_dir": folder, "database_url": url, "log_level": "error"}, environ={})
    configure_logging("error", json=False)
    appliance = Appliance(settings, engines=False)
    await appliance.start()
    services = appliance.services
    try:
        await services.sampler.sample()
        began_s = time.perf_counter()
        tenant_id, key_id = await fill(services, count)
        filled_s, began_s = time.perf_counter() - began_s, time.perf_counter()
        num_sums = await rollups.rebuild(services.db, BillingCalendar())
        rebuilt_s = time.perf_counter() - began_s
        await _analyze(services.db)
        member = await services.members.create("alice@example.com", "a password of the bench", "owner")
        token, _session = await services.sessions.open(member.id, "bench", "127.0.0.1")
        transport = httpx.ASGITransport(app=cast(Any, create_app(appliance)))
        headers = {"cookie": f"{SESSION_COOKIES[1]}={token}", "sec-fetch-site": "same-origin"}
        async with httpx.AsyncClient(transport=transport, base_url="http://box", headers=headers) as client:
            asked = questions(services.clock.now(), tenant_id, key_id)
            samples = {name: await ask(client, path) for name, path in asked.items()}
    finally:
        await appliance.stop()
    return {
        "bench": "million_rows",
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2), "python": platform.python_version()},
        "database": services.db.kind,
        "events": count,
        "sums": num_sums,
        "fill_s": round(filled_s, 1),
        "rebuild_s": round(rebuilt_s, 1),
        "goal_ms": GOAL_MS,
        "median_ms": {name: round(statistics.median(ms for ms, _ in each), 1) for name, each in samples.items()},
        "worst_ms": {name: round(max(ms for ms, _ in each), 1) for name, each in samples.items()},
        "worked_ms": {name: round(statistics.median(worked for _, worked in each), 1) for name, each in samples.items()},
    }


async def _analyze(database: Database) -> None:
    """Let the database know its tables, as time does on PostgreSQL."""
    if database.kind == "postgresql":
        async with database.writing() as connection:
            await connection.execute(text("ANALYZE"))


@contextmanager
def fresh_database(kind: str, folder: Path) -> Iterator[str]:
    """Yield the URL of a migrated database of its own."""
    if kind == "sqlite":
        url = f"sqlite:///{folder / 'gatehouse.db'}"
        db.upgrade(url)
        yield url
        return
    binaries = postgresql_binaries()
    if binaries is None:
        raise SystemExit("there are no PostgreSQL binaries on this machine")
    with running_cluster(binaries) as cluster:
        yield cluster.lend()


def main() -> None:
    """Measure and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), action="append")
    parser.add_argument("--dry-run", action="store_true", help="print the row and keep it out of bench/results/")
    given = parser.parse_args()
    for kind in given.database or ("sqlite", "postgresql"):
        with tempfile.TemporaryDirectory() as name, fresh_database(kind, Path(name)) as url:
            row = asyncio.run(measure(url, Path(name), given.events))
        print(json.dumps(row))
        if not given.dry_run:
            with RESULTS.open("a", encoding="utf-8") as results:
                results.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
