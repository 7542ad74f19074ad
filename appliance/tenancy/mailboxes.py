"""Disables alerts to the mailbox of a person who loses access, because alerts contain data of the tenant."""

from __future__ import annotations

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.clock import Clock
from appliance.base.db import Database, after_commit
from appliance.base.tables import webhooks
from appliance.tenancy import audit


async def disable_alerts(connection: AsyncConnection, clock: Clock, email: str, *, tenant_id: str | None = None) -> None:
    """Disable the alerts to this mailbox (of one tenant, if given) in the transaction in which its owner loses access.

    Pending messages are kept; whoever manages the alerts may enable them again.
    """
    condition = (webhooks.c.kind == "email") & (func.lower(webhooks.c.target) == email.lower())
    condition &= webhooks.c.removed_at.is_(None) & webhooks.c.disabled_at.is_(None)
    if tenant_id is not None:
        condition &= webhooks.c.tenant_id == tenant_id
    rows = (await connection.execute(select(webhooks.c.id, webhooks.c.tenant_id).where(condition))).all()
    if not rows:
        return
    await connection.execute(update(webhooks).where(condition).values(disabled_at=clock.now()))
    after_commit(connection, _bump_webhooks)
    for row in rows:
        target = ("webhook.disable", "webhook", row.id)
        before, after = {"disabled": False}, {"disabled": True}
        await audit.record(connection, clock, *target, tenant_id=row.tenant_id, before=before, after=after)


def _bump_webhooks(db: Database) -> None:
    db.webhook_changes.bump()
