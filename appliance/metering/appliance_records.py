"""Appliance-wide records that change at run time, stored as JSON by name. Does not interpret their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.clock import Clock
from appliance.base.db import Database, upsert_for
from appliance.base.tables import appliance_records
from appliance.tenancy import audit

SELLER = "seller"
HARDWARE = "hardware"


class ApplianceRecords:
    """Reads and writes named records; a write replaces the whole record."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock

    async def get(self, name: str) -> Mapping[str, Any] | None:
        """Return the record, None if it was never written."""
        async with self._db.reading() as connection:
            return await read_record(connection, name)

    async def put(self, name: str, value: Mapping[str, Any]) -> None:
        """Replace the record, with an audit entry."""
        columns = {"value": dict(value), "updated_at": self._clock.now()}
        async with self._db.writing() as connection:
            before = await read_record(connection, name)
            statement = upsert_for(connection.dialect.name, appliance_records, ["name"], list(columns))
            await connection.execute(statement.values(name=name, **columns))
            await audit.record(connection, self._clock, f"{name}.change", "appliance", name, before=before or {}, after=value)


async def read_record(connection: AsyncConnection, name: str) -> Mapping[str, Any] | None:
    """Return the record as seen by `connection`, None if it was never written."""
    query = select(appliance_records.c.value).where(appliance_records.c.name == name)
    record: Mapping[str, Any] | None = (await connection.execute(query)).scalar_one_or_none()
    return record
