"""Alerts about API keys that expire within a week, once per key and expiry time. The exact minute does not matter."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import RowMapping, select

from appliance.base.batches import batched
from appliance.base.clock import Clock, rfc3339
from appliance.base.db import Database
from appliance.base.tables import api_keys, tenants
from appliance.metering.alerts import outbox

AHEAD = timedelta(days=7)
SWEEP_INTERVAL_S = 3600.0
KEYS_PER_TRANSACTION = 50  # on SQLite a transaction blocks settlements
_DATA_FIELDS = ("tenant_id", "tenant_name", "key_id", "key_name", "prefix")


class KeyExpiryAlerts:
    """Alerts about the keys of all tenants, except rotated keys and keys created with a lifetime of at most a week."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock
        self._swept_versions = (-1, -1)
        self._swept_s = 0.0
        self._enqueued: set[str] = set()  # subjects of the alerts due, for the webhooks as of `_enqueued_as_of`
        self._enqueued_as_of = -1

    async def sweep(self) -> None:
        """Enqueue an alert for every key that expires within a week, if keys or webhooks have changed since the last sweep or
        SWEEP_INTERVAL_S have passed."""
        versions = (self._db.principal_changes.value, self._db.webhook_changes.value)
        now_s = self._clock.monotonic_s()
        if versions == self._swept_versions and now_s - self._swept_s < SWEEP_INTERVAL_S:
            return
        if versions[1] != self._enqueued_as_of:
            self._enqueued_as_of, self._enqueued = versions[1], set()
        due = {f"{row['key_id']}:{rfc3339(row['expires_at'])}": row for row in await self._due()}
        self._enqueued &= due.keys()
        new = [subject for subject in due if subject not in self._enqueued]
        for subjects in batched(new, KEYS_PER_TRANSACTION):
            messages = [_message(subject, due[subject]) for subject in subjects]
            async with self._db.writing() as connection:
                await connection.run_sync(outbox.enqueue, self._clock.now(), messages)
            self._enqueued.update(subjects)
        self._swept_versions, self._swept_s = versions, now_s

    async def _due(self) -> list[RowMapping]:
        now = self._clock.now()
        columns = api_keys.c
        query = (
            select(
                columns.tenant_id,
                tenants.c.name.label("tenant_name"),
                columns.id.label("key_id"),
                columns.name.label("key_name"),
                columns.prefix,
                columns.expires_at,
                columns.created_at,
            )
            .join_from(api_keys, tenants, tenants.c.id == columns.tenant_id)
            .where(columns.expires_at > now, columns.expires_at <= now + AHEAD)
            .where(columns.revoked_at.is_(None), columns.replaced_by.is_(None), tenants.c.archived_at.is_(None))
            .order_by(columns.expires_at, columns.id)
        )
        async with self._db.reading() as connection:
            rows = (await connection.execute(query)).mappings().all()
        return [row for row in rows if row["expires_at"] - row["created_at"] > AHEAD]


def _message(subject: str, row: RowMapping) -> outbox.Message:
    data = {**{name: row[name] for name in _DATA_FIELDS}, "expires_at": rfc3339(row["expires_at"])}
    return outbox.Message("key.expiring", subject, data, row["tenant_id"])
