"""Appliance-wide records that change at run time, stored as JSON by name. Does not interpret their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.clock import Clock
from appliance.base.db import Database, upsert_for
from appliance.base.tables import appliance_records
from appliance.tenancy import audit

SELLER = "seller"
HARDWARE = "hardware"


@dataclass(frozen=True, slots=True)
class ApplianceRecord:
    """The value stored under a name, and when it was stored."""

    value: Mapping[str, Any]
    updated_at: datetime


class ApplianceRecords:
    """Reads and writes named records; a write replaces the whole record."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock

    async def get(self, name: str) -> ApplianceRecord | None:
        """Return the record, None if it was never written."""
        async with self._db.reading() as connection:
            return await read_record(connection, name)

    async def put(self, name: str, value: Mapping[str, Any]) -> ApplianceRecord:
        """Replace the record, with an audit entry, and return it."""
        now = self._clock.now()
        columns = {"value": dict(value), "updated_at": now}
        async with self._db.writing() as connection:
            before = await read_record(connection, name)
            statement = upsert_for(connection.dialect.name, appliance_records, ["name"], list(columns))
            await connection.execute(statement.values(name=name, **columns))
            old = {} if before is None else before.value
            await audit.record(connection, self._clock, f"{name}.change", "appliance", name, before=old, after=value)
        return ApplianceRecord(value, now)


async def read_record(connection: AsyncConnection, name: str) -> ApplianceRecord | None:
    """Return the record as seen by `connection`, None if it was never written."""
    row = (await connection.execute(select(appliance_records).where(appliance_records.c.name == name))).mappings().first()
    return None if row is None else ApplianceRecord(row["value"], row["updated_at"])
