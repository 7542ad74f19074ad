"""Epochs: runs of the gateway on one database. The next one fences off the last, even if that is still alive (`lock_epoch`)."""

from __future__ import annotations

import os

from sqlalchemy import Connection, insert, select, update

from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.ids import new_id
from appliance.base.tables import epochs


class EpochEnded(Exception):
    """A later run of the gateway has begun on this database: this one must neither write nor recover anything."""


async def begin_epoch(db: Database, clock: Clock, version: str) -> str:
    """Begin a new epoch and return its id. Earlier epochs end and can admit no more requests."""
    epoch_id, now = new_id("epoch"), clock.now()
    async with db.writing() as connection:
        await connection.execute(update(epochs).where(epochs.c.ended_at.is_(None)).values(ended_at=now))
        await connection.execute(insert(epochs).values(id=epoch_id, version=version, pid=os.getpid(), started_at=now))
    return epoch_id


async def end_epoch(db: Database, clock: Clock, epoch_id: str) -> None:
    """Record that the epoch ended with nothing pending."""
    async with db.writing() as connection:
        await connection.execute(
            update(epochs).where(epochs.c.id == epoch_id, epochs.c.ended_at.is_(None)).values(ended_at=clock.now())
        )


def lock_epoch(connection: Connection, epoch_id: str) -> None:
    """Keep later epochs from beginning until this transaction ends. Raises EpochEnded if the epoch has ended."""
    is_open = select(epochs.c.id).where(epochs.c.id == epoch_id, epochs.c.ended_at.is_(None)).with_for_update(read=True)
    if connection.execute(is_open).first() is None:
        raise EpochEnded(f"the epoch {epoch_id} has ended: another Gatehouse has taken over this database")


async def is_open(db: Database, epoch_id: str) -> bool:
    """Return whether the epoch has not ended."""
    async with db.reading() as connection:
        found = await connection.execute(select(epochs.c.id).where(epochs.c.id == epoch_id, epochs.c.ended_at.is_(None)))
        return found.first() is not None
