"""Sum of events = rollups = usage reports = invoice lines before rounding, over random months of requests.

On each database as the appliance runs on it: SQLite with the journal in which admissions and settlements are durable first.

The suite runs a few thousand requests on each database; all hundred thousand:
    python -m tests.property.test_metering_reconciliation 100000 [--database sqlite|postgresql] [--seed N]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from appliance.base import db
from appliance.base.db import Database
from appliance.cli import invariants
from tests.support.databases import postgresql_binaries, running_cluster
from tests.support.reconciliation import ZONE, reconcile

REQUESTS = 5_000


async def test_every_view_of_the_ledger_comes_to_the_same_sums(database: Database, database_url: str) -> None:
    history, totals = await reconcile(database, database_url, REQUESTS, seed=20261121)
    assert totals["requests"] > REQUESTS * 0.9
    assert min(history.closed, history.recovered, history.steps_back, len(history.prices) - 4) > 0
    assert history.leap
    assert (history.replayed > 0) == (database.kind == "sqlite"), "deaths left lines in the journal alone, where there is one"
    assert await broken(database_url) == []


async def broken(url: str) -> list[str]:
    """The promises of the ledger that a check of the database finds broken."""
    findings = await invariants.check(url, running=False, time_zone=ZONE)
    return [f"{finding.name}: {finding.text}" for finding in findings if finding.state == "broken"]


@contextmanager
def fresh_database(kind: str) -> Iterator[str]:
    """Yield the URL of a migrated database of its own."""
    if kind == "sqlite":
        with tempfile.TemporaryDirectory() as folder:
            url = f"sqlite:///{Path(folder) / 'gatehouse.db'}"
            db.upgrade(url)
            yield url
        return
    binaries = postgresql_binaries()
    assert binaries is not None, "no PostgreSQL binaries on this machine"
    with running_cluster(binaries) as cluster:
        yield cluster.lend()


async def run(url: str, num_requests: int, seed: int) -> str:
    """Reconcile and return one line about it."""
    database = Database.open(url)
    try:
        began_s = time.monotonic()
        history, totals = await reconcile(database, url, num_requests, seed)
        reconciled_s = time.monotonic() - began_s
        assert await broken(url) == []
    finally:
        await database.close()
    return (
        f"{database.kind}: {totals['requests']} billed requests, {totals['cost_picos']} pico-units in every view; "
        f"{len(history.prices)} prices, {history.closed} closed invoices, {history.recovered} recovered, "
        f"{history.replayed} records brought from the journal, {history.steps_back} steps back; {reconciled_s:.0f} s"
    )


def main() -> None:
    """Run as many requests as the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("requests", type=int)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with fresh_database(given.database) as url:
        print(asyncio.run(run(url, given.requests, given.seed)))  # noqa: T201 - what the command is for


if __name__ == "__main__":
    main()
