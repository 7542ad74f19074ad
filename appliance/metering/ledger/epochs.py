"""Whether an epoch may still write: the one that begins after it ends it, whatever the earlier gateway knows of that."""

from __future__ import annotations

from sqlalchemy import Connection, select

from appliance.base.db import Database
from appliance.base.tables import epochs


class EpochEnded(Exception):
    """A later run of the gateway has begun on this database: this one must not write, nor settle what it finds."""


def hold(connection: Connection, epoch_id: str) -> None:
    """Let no later epoch begin before this transaction ends. Raises EpochEnded when one has begun, or this one has ended."""
    is_open = select(epochs.c.id).where(epochs.c.id == epoch_id, epochs.c.ended_at.is_(None)).with_for_update(read=True)
    if connection.execute(is_open).first() is None:
        raise EpochEnded(f"the epoch {epoch_id} has ended: another Gatehouse has begun to use this database")


async def is_open(db: Database, epoch_id: str) -> bool:
    """Return whether the epoch has not ended."""
    async with db.reading() as connection:
        found = await connection.execute(select(epochs.c.id).where(epochs.c.id == epoch_id, epochs.c.ended_at.is_(None)))
        return found.first() is not None
