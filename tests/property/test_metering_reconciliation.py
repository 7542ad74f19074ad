"""Sum of events = rollups = usage reports = invoice lines before rounding, over random months of requests.

On each database as the appliance runs on it: SQLite with the journal in which admissions and settlements are durable first.

The suite runs a thousand requests on each database; all hundred thousand:
    python -m tests.property.test_metering_reconciliation 100000 [--database sqlite|postgresql] [--seed N] [--save FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from appliance.base import migrations
from appliance.base.db import Database
from appliance.metering.invariants.check import check_ledger
from bench.rows import append_row, row_header
from tests.support.databases import postgresql_binaries, running_cluster
from tests.support.reconciliation import ZONE, History, reconcile

REQUESTS = 1_200


async def test_every_view_of_the_ledger_has_the_same_sums(database: Database, database_url: str) -> None:
    history, totals = await reconcile(database, database_url, REQUESTS, seed=20261121)
    assert totals["requests"] > REQUESTS * 0.9
    assert min(history.closed, history.recovered, history.steps_back, len(history.prices) - 4) > 0
    assert history.leap
    assert 0.1 < batch_requests(history) / totals["requests"] < 0.3
    assert (history.replayed > 0) == (database.kind == "sqlite"), "deaths left lines in the journal alone, where there is one"
    assert await broken(database_url) == []


def batch_requests(history: History) -> int:
    """How many of the billed requests were batch work."""
    return sum(fact.batch and fact.billed and fact.is_request for fact in history.facts)


async def broken(url: str) -> list[str]:
    """The promises of the ledger that a check of the database finds broken."""
    findings = await check_ledger(url, running=False, time_zone=ZONE)
    return [f"{finding.name}: {finding.text}" for finding in findings if finding.state == "broken"]


@contextmanager
def fresh_database(kind: str) -> Iterator[str]:
    """Yield the URL of a migrated database of its own."""
    if kind == "sqlite":
        with tempfile.TemporaryDirectory() as folder:
            url = f"sqlite:///{Path(folder) / 'gatehouse.db'}"
            migrations.upgrade(url)
            yield url
        return
    binaries = postgresql_binaries()
    assert binaries is not None, "no PostgreSQL binaries on this machine"
    with running_cluster(binaries) as cluster:
        yield cluster.acquire()


async def run(url: str, num_requests: int, seed: int) -> dict[str, Any]:
    """Reconcile and return the row of figures. Raises AssertionError when two views differ or a promise is broken."""
    async with Database.open(url) as database:
        began_s = time.monotonic()
        history, totals = await reconcile(database, url, num_requests, seed)
        reconciled_s = time.monotonic() - began_s
        assert await broken(url) == []
    return {
        **row_header("metering_reconciliation"),
        "database": database.kind,
        "seed": seed,
        "requests": num_requests,
        "billed_in_every_view": totals,
        "batch_requests": batch_requests(history),
        "prices": len(history.prices),
        "closed_invoices": history.closed,
        "recovered": history.recovered,
        "brought_from_the_journal": history.replayed,
        "clock_steps_back": history.steps_back,
        "leap_second": history.leap,
        "took_s": round(reconciled_s, 1),
    }


def main() -> None:
    """Run as many requests as the command line asks for and print the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", type=int)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, help="add the row to this file")
    given = parser.parse_args()
    with fresh_database(given.database) as url:
        row = asyncio.run(run(url, given.requests, given.seed))
    print(json.dumps(row, indent=1))  # noqa: T201 - what the command is for
    if given.save:
        options = f"{given.requests} --database {given.database} --seed {given.seed}"
        row["command"] = f"python -m tests.property.test_metering_reconciliation {options}"
        append_row(given.save, row)


if __name__ == "__main__":
    main()
