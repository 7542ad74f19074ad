"""Response times of the usage API and the console with a ledger of a million events, on SQLite and on PostgreSQL.

The events belong to TENANTS tenants with KEYS keys each and the models MODELS, over the last DAYS days; a few owners use
much, and many use little. There are as many requests as events. Both are written directly, in the form that the ledger's writer
uses, and rolled up by `rollups.rebuild`, which is timed too. Then the whole application answers in this process, without
engines: each query REPEATS times after a warm-up; reports of many pages are then read from the first page to the last, each
page once (`walks`). Other work on the machine is not stopped: the row records the load and, besides the time of an answer, this
process's CPU time for it (which includes SQLite's work but not PostgreSQL's).

    python -m bench.million_rows [--events 1000000] [--database sqlite]
                             prints one row per database and adds it to bench/results/
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, cast

import httpx
from sqlalchemy import insert, text

from appliance.app import Appliance, create_app
from appliance.base import counters, migrations
from appliance.base.db import Database
from appliance.base.interpreter import prepare_to_serve
from appliance.base.logging import configure_logging
from appliance.base.settings import load_settings
from appliance.base.tables import requests, usage_events
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger import rollups
from appliance.metering.ledger.epochs import begin_epoch
from appliance.serving.services import Services
from appliance.tenancy.access import WHOLE_APPLIANCE
from appliance.tenancy.browser_rules import session_cookie_name
from bench.million_rows_queries import QuerySubjects, queries, walks
from bench.rows import argument_parser, publish, row_header
from tests.support.databases import postgresql_binaries, running_cluster

TENANTS, KEYS, DAYS = 100, 4, 30
MODELS = {"small": 7000, "medium": 2499, "large": 500, "rare": 1}
"""How many of every ten thousand events belong to each model."""
REPEATS = 15
GOAL_MS = 200
INSERT_ROWS = 20_000


async def fill(services: Services, count: int) -> QuerySubjects:
    """Write `count` events and their requests."""
    owners = []
    for number in range(TENANTS):
        tenant = await services.tenants.create(name=f"tenant {number}", access=WHOLE_APPLIANCE)
        for _ in range(KEYS):
            key, _secret = await services.keys.create(tenant.id, name="key", access=WHOLE_APPLIANCE)
            owners.append((tenant.id, key.id))
    quiet = await services.tenants.create(name="a tenant that used nothing", access=WHOLE_APPLIANCE)
    prices = {}
    for model in MODELS:
        price = await services.prices.add(model=model, currency="EUR", prompt=150_000, cached_prompt=15_000, completion=600_000)
        prices[model] = price.id
    epoch_id = await begin_epoch(services.db, services.clock, "bench")
    rng, step = random.Random(1), timedelta(days=DAYS) / count
    start = services.clock.now() - timedelta(days=DAYS)
    for begin in range(0, count, INSERT_ROWS):
        rows = [
            _event(number, start + number * step, rng, owners, prices, epoch_id)
            for number in range(begin, min(begin + INSERT_ROWS, count))
        ]
        async with services.db.writing() as connection:
            await connection.execute(insert(usage_events), rows)
            await connection.execute(insert(requests), [_request(row) for row in rows])
    async with services.db.writing() as connection:
        await counters.take(connection, counters.POSTING, count)
    return QuerySubjects(
        tenant_id=owners[0][0],
        key_id=owners[0][1],
        quiet_tenant_id=quiet.id,
        quiet_key_ids=tuple(key_id for _tenant_id, key_id in owners[-3:]),
        request_id=_request_id(count // 2),
    )


def _request_id(number: int) -> str:
    return f"req_{number:026d}"


def _event(
    number: int,
    moment: datetime,
    rng: random.Random,
    owners: list[tuple[str, str]],
    prices: dict[str, str],
    epoch_id: str,
) -> dict[str, Any]:
    tenant_id, key_id = owners[int(len(owners) * rng.random() ** 3)]  # the first owner gets a seventh of all events
    (model,) = rng.choices(list(MODELS), list(MODELS.values()))
    prompt, completion = rng.randrange(1, 4000), rng.randrange(1, 800)
    cached = rng.randrange(prompt)
    voided = number % 1000 == 999
    if voided:
        prompt = cached = completion = 0
    return {
        "request_id": _request_id(number),
        "tenant_id": tenant_id,
        "key_id": key_id,
        "epoch_id": epoch_id,
        "model": model,
        "endpoint": "/v1/chat/completions",
        "kind": "usage",
        "status": "voided" if voided else "posted",
        "finish_reason": "error" if voided else "stop",
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


async def time_pages(client: httpx.AsyncClient, path: str) -> list[float]:
    """Return the milliseconds of each page of a report."""
    samples: list[float] = []
    position: dict[str, str] = {}
    while True:
        began_s = time.perf_counter()
        answer = await client.get(str(httpx.URL(path).copy_merge_params(position)))
        samples.append((time.perf_counter() - began_s) * 1000)
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:300]}")
        page = answer.json()
        if not page["has_more"]:
            return samples
        position = {"page": page["next_page"]} if "next_page" in page else {"cursor": page["next_cursor"]}


async def time_query(client: httpx.AsyncClient, path: str) -> list[tuple[float, float]]:
    """Return the milliseconds of each answer after the first, and the CPU milliseconds that this process spent on it."""
    samples = []
    for _ in range(REPEATS + 1):
        began_s, worked_s = time.perf_counter(), time.process_time()
        answer = await client.get(path)
        samples.append(((time.perf_counter() - began_s) * 1000, (time.process_time() - worked_s) * 1000))
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:300]}")
    return samples[1:]


async def measure(url: str, folder: Path, count: int) -> dict[str, Any]:
    """Fill the database at `url`, run every query, and return the row."""
    settings = load_settings(options={"data_dir": folder, "database_url": url, "log_level": "error"}, environ={})
    configure_logging("error", json=False)
    appliance = Appliance(settings, engines=False)
    await appliance.start()
    services = appliance.services
    try:
        await services.sampler.sample()
        began_s = time.perf_counter()
        subjects = await fill(services, count)
        filled_s, began_s = time.perf_counter() - began_s, time.perf_counter()
        num_sums = await rollups.rebuild(services.db, BillingCalendar())
        rebuilt_s = time.perf_counter() - began_s
        await analyze(services.db)
        member = await services.members.create("alice@example.com", "a password of the bench", "owner")
        token, _session = await services.sessions.open(member.id, "bench", "127.0.0.1")
        prepare_to_serve()  # as `gatehouse serve` does
        transport = httpx.ASGITransport(app=cast(Any, create_app(appliance)))
        headers = {"cookie": f"{session_cookie_name(secure=False)}={token}", "sec-fetch-site": "same-origin"}
        async with httpx.AsyncClient(transport=transport, base_url="http://appliance", headers=headers) as client:
            now = services.clock.now()
            samples = {name: await time_query(client, path) for name, path in queries(now, subjects).items()}
            pages = {name: await time_pages(client, path) for name, path in walks(now).items()}
    finally:
        await appliance.stop()
    return {
        **row_header("million_rows"),
        "database": services.db.kind,
        "events": count,
        "keys": TENANTS * KEYS,
        "sums": num_sums,
        "fill_s": round(filled_s, 1),
        "rebuild_s": round(rebuilt_s, 1),
        "goal_ms": GOAL_MS,
        "median_ms": {name: round(statistics.median(ms for ms, _ in each), 1) for name, each in samples.items()},
        "worst_ms": {name: round(max(ms for ms, _ in each), 1) for name, each in samples.items()},
        "worked_ms": {name: round(statistics.median(worked for _, worked in each), 1) for name, each in samples.items()},
        "walks": {
            name: {"pages": len(each), "median_ms": round(statistics.median(each), 1), "worst_ms": round(max(each), 1)}
            for name, each in pages.items()
        },
    }


async def analyze(database: Database) -> None:
    """Update the query planner's statistics, as PostgreSQL's autovacuum eventually does."""
    if database.kind == "postgresql":
        async with database.writing() as connection:
            await connection.execute(text("ANALYZE"))


@contextmanager
def fresh_database(kind: str, folder: Path) -> Iterator[str]:
    """Yield the URL of a new, migrated database."""
    if kind == "sqlite":
        url = f"sqlite:///{folder / 'gatehouse.db'}"
        migrations.upgrade(url)
        yield url
        return
    binaries = postgresql_binaries()
    if binaries is None:
        raise SystemExit("PostgreSQL's binaries are not installed on this machine")
    with running_cluster(binaries) as cluster:
        yield cluster.acquire()


def main() -> None:
    """Measure and write the rows."""
    parser = argument_parser(__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), action="append")
    options = parser.parse_args()
    for kind in options.database or ("sqlite", "postgresql"):
        with tempfile.TemporaryDirectory() as name, fresh_database(kind, Path(name)) as url:
            row = asyncio.run(measure(url, Path(name), options.events))
        publish(row, options)


if __name__ == "__main__":
    main()
