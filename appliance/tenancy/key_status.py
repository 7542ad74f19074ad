"""Reads the current state of keys, including revoked ones, to decide whether running requests may go on."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import select

from appliance.base.batches import batched
from appliance.base.db import Database
from appliance.base.tables import api_keys, tenants
from appliance.tenancy.principals import Principal
from appliance.tenancy.rows import key_from_row, tenant_from_row

KEYS_PER_QUERY = 500


async def read_principals(db: Database, key_ids: Collection[str]) -> dict[str, Principal]:
    """Return the existing keys and their tenants, by key id."""
    found: dict[str, Principal] = {}
    change_count = db.principal_changes.value
    async with db.reading() as connection:
        for ids in batched(sorted(key_ids), KEYS_PER_QUERY):
            keys = select(api_keys).where(api_keys.c.id.in_(ids))
            rows = (await connection.execute(keys)).mappings().all()
            owners = select(tenants).where(tenants.c.id.in_({row["tenant_id"] for row in rows}))
            by_id = {row["id"]: tenant_from_row(row) for row in (await connection.execute(owners)).mappings()}
            for row in rows:
                tenant, key = by_id[row["tenant_id"]], key_from_row(row)
                found[key.id] = Principal(tenant=tenant, key=key, change_count=change_count)
    return found


def end_cause(principal: Principal | None, now: datetime) -> str | None:
    """Return why requests of this key must end: key_revoked, tenant_archived, tenant_suspended or key_expired; None if they
    may go on. A missing key counts as revoked."""
    if principal is None or principal.key.revoked_at is not None:
        return "key_revoked"
    if principal.tenant.archived:
        return "tenant_archived"
    if principal.tenant.suspended:
        return "tenant_suspended"
    expires_at = principal.key.expires_at
    return "key_expired" if expires_at is not None and expires_at <= now else None
