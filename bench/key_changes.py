"""How long requests wait for their key to be verified after a change of keys or tenants, on SQLite and PostgreSQL.

CLIENTS clients send requests, and what they need is cached. In each of ROUNDS rounds something is changed, and then every
client has its key verified at the same time, as a request does first. Times are from the change until a client has its
principal.

own      all clients use one key, which is changed
leaving  the same, and every second client disconnects while it waits
other    each client has a key and tenant of its own; a tenant without clients is changed

    python -m bench.key_changes [--database sqlite]
                             prints one row per database and adds it to bench/results/
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.clock import SystemClock
from appliance.base.db import Database
from appliance.tenancy.access import WHOLE_APPLIANCE
from appliance.tenancy.keys import Keys
from appliance.tenancy.principals import ApiKey, KeyChanges, TenantChanges
from appliance.tenancy.tenants import Tenants
from bench.million_rows import fresh_database
from bench.rows import argument_parser, publish, row_header

CLIENTS, ROUNDS = 80, 40
STEPS_BEFORE_LEAVING = 5
"""Iterations of the event loop in which those that disconnect wait."""


class Bench:
    """Clients of one database."""

    def __init__(self, db: Database) -> None:
        self._keys = Keys(db, SystemClock(), b"p" * 32)
        self._tenants = Tenants(db, SystemClock())
        self._num_reads = 0
        self._reading = db.reading
        db.reading = self._counted_reading  # type: ignore[method-assign]

    @asynccontextmanager
    async def _counted_reading(self) -> AsyncIterator[AsyncConnection]:
        self._num_reads += 1
        async with self._reading() as connection:
            yield connection

    async def run(self) -> list[dict[str, Any]]:
        """Measure every case."""
        own, secret = await self._make("own")
        other, _secret = await self._make("other")
        of_each = [(await self._make(f"tenant {number}"))[1] for number in range(CLIENTS)]
        return [
            await self._measure("own", own, [secret] * CLIENTS),
            await self._measure("leaving", own, [secret] * CLIENTS),
            await self._measure("other", other, of_each),
        ]

    async def _make(self, name: str) -> tuple[ApiKey, str]:
        tenant = await self._tenants.create(name=name, access=WHOLE_APPLIANCE)
        return await self._keys.create(tenant.id, name="key", access=WHOLE_APPLIANCE)

    async def _measure(self, case: str, changed: ApiKey, secrets: Sequence[str]) -> dict[str, Any]:
        waits_s: list[float] = []
        num_reads = 0
        await asyncio.gather(*(self._keys.authenticate(secret, "127.0.0.1") for secret in secrets))
        for number in range(ROUNDS):
            if case == "other":
                await self._tenants.update(changed.tenant_id, TenantChanges(weight=1 + number), access=WHOLE_APPLIANCE)
            else:
                await self._keys.update(changed.id, KeyChanges(name=f"key {number}"), access=WHOLE_APPLIANCE)
            began_s, reads_before = time.perf_counter(), self._num_reads
            clients = [asyncio.create_task(self._client(secret, began_s, waits_s)) for secret in secrets]
            if case == "leaving":
                for _ in range(STEPS_BEFORE_LEAVING):
                    await asyncio.sleep(0)
                for client in clients[::2]:
                    client.cancel()
            await asyncio.wait(clients)
            num_reads += self._num_reads - reads_before
        waits_s.sort()
        return {
            "case": case,
            "wait_ms_median": round(statistics.median(waits_s) * 1000, 2),
            "wait_ms_p99": round(waits_s[len(waits_s) * 99 // 100] * 1000, 2),
            "wait_ms_max": round(waits_s[-1] * 1000, 2),
            "reads_per_change": round(num_reads / ROUNDS, 1),
        }

    async def _client(self, secret: str, began_s: float, waits_s: list[float]) -> None:
        await self._keys.authenticate(secret, "127.0.0.1")
        waits_s.append(time.perf_counter() - began_s)


async def measure(kind: str) -> list[dict[str, Any]]:
    """Measure every case on a new database."""
    with tempfile.TemporaryDirectory() as folder, fresh_database(kind, Path(folder)) as url:
        async with Database.open(url) as db:
            return await Bench(db).run()


def main() -> None:
    """Measure and write the rows."""
    parser = argument_parser(__doc__)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), action="append")
    options = parser.parse_args()
    for kind in options.database or ("sqlite", "postgresql"):
        setup = {"database": kind, "clients": CLIENTS, "rounds": ROUNDS}
        publish({**row_header("key_changes"), "setup": setup, "cases": asyncio.run(measure(kind))}, options)


if __name__ == "__main__":
    main()
