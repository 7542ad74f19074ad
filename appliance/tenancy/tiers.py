"""The tiers and their settings. A tier without a row has the defaults defined here."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.clock import Clock
from appliance.base.db import Database, upsert_for
from appliance.base.errors import NotFound
from appliance.base.tables import tiers
from appliance.tenancy import audit
from appliance.tenancy.cached_table import CachedTable
from appliance.tenancy.fields import TIERS, check_whole

ADMISSION_WAIT_MS_MAX = 60_000
ADMISSION_WAIT_MS_DEFAULT = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A tier. `admission_wait_ms`: how long a request over a limit may wait for room before it is refused with 429."""

    name: str
    admission_wait_ms: int


class Tiers:
    """The store of tiers, cached in memory. A change by this process applies from the next request on."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock
        self._by_name = CachedTable(db, tiers, self._read)

    async def list(self) -> list[Tier]:
        """Return the tiers from the most to the least urgent."""
        tiers_by_name = await self._by_name.get()
        return [tiers_by_name[name] for name in TIERS]

    async def get(self, name: str) -> Tier:
        """Return the tier. Raises NotFound. Reads the database only after a change."""
        tiers_by_name = await self._by_name.get()
        if name not in tiers_by_name:
            raise NotFound(f"no such tier; choose from {', '.join(TIERS)}", param="name")
        return tiers_by_name[name]

    async def update(self, name: str, *, admission_wait_ms: int) -> Tier:
        """Change the settings of a tier; they apply from the next request on. Raises NotFound and InvalidValue."""
        before = await self.get(name)
        after = Tier(name=name, admission_wait_ms=check_whole(admission_wait_ms, "admission_wait_ms", 0, ADMISSION_WAIT_MS_MAX))
        async with self._db.changing_principals(tiers.name) as connection:
            await self._write(connection, after)
            was, now = (audit.recorded_fields(tier, "name") for tier in (before, after))
            await audit.record(connection, self._clock, "tier.update", "tier", name, before=was, after=now)
        return after

    async def _write(self, connection: AsyncConnection, tier: Tier) -> None:
        values = {"admission_wait_ms": tier.admission_wait_ms, "updated_at": self._clock.now()}
        statement = upsert_for(connection.dialect.name, tiers, ["name"], list(values))
        await connection.execute(statement.values(name=tier.name, **values))

    async def _read(self) -> dict[str, Tier]:
        async with self._db.reading() as connection:
            rows = (await connection.execute(select(tiers.c.name, tiers.c.admission_wait_ms))).all()
        waits = dict.fromkeys(TIERS, ADMISSION_WAIT_MS_DEFAULT) | {row.name: row.admission_wait_ms for row in rows}
        return {name: Tier(name=name, admission_wait_ms=waits[name]) for name in TIERS}
