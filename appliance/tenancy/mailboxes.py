"""Disables the alerts to a person's mailbox when that person leaves: they report what only the tenant's people may see."""

from __future__ import annotations

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.clock import Clock
from appliance.base.db import Database, after_commit
from appliance.base.tables import webhooks
from appliance.tenancy import audit


async def disable_alerts(connection: AsyncConnection, clock: Clock, email: str, *, tenant_id: str | None = None) -> None:
    """Disable the alerts to this mailbox, those of one tenant if given, in the transaction in which its owner leaves.

    Pending messages wait, and those who manage the alerts may enable them again.
    """
    found = (webhooks.c.kind == "email") & (func.lower(webhooks.c.target) == email.lower())
    found &= webhooks.c.removed_at.is_(None) & webhooks.c.disabled_at.is_(None)
    if tenant_id is not None:
        found &= webhooks.c.tenant_id == tenant_id
    rows = (await connection.execute(select(webhooks.c.id, webhooks.c.tenant_id).where(found))).all()
    if not rows:
        return
    await connection.execute(update(webhooks).where(found).values(disabled_at=clock.now()))
    after_commit(connection, _changed)
    for row in rows:
        target = ("webhook.disable", "webhook", row.id)
        before, after = {"disabled": False}, {"disabled": True}
        await audit.record(connection, clock, *target, tenant_id=row.tenant_id, before=before, after=after)


def _changed(db: Database) -> None:
    db.webhooks.bump()
