"""Runs of the gateway on one database: each may write until the next begins, even if it has not noticed that."""

from __future__ import annotations

import os

from sqlalchemy import Connection, insert, select, update

from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.ids import new_id
from appliance.base.tables import epochs


class EpochEnded(Exception):
    """A later run of the gateway has begun on this database: this one must not write, nor settle what it finds."""


async def begin_epoch(db: Database, clock: Clock, version: str) -> str:
    """Return the id of a new epoch: one run of the gateway. Earlier epochs end and can begin no more requests."""
    epoch_id, now = new_id("epoch"), clock.now()
    async with db.writing() as connection:
        await connection.execute(update(epochs).where(epochs.c.ended_at.is_(None)).values(ended_at=now))
        await connection.execute(insert(epochs).values(id=epoch_id, version=version, pid=os.getpid(), started_at=now))
    return epoch_id


async def end_epoch(db: Database, clock: Clock, epoch_id: str) -> None:
    """Note that the epoch ended, with nothing pending."""
    async with db.writing() as connection:
        await connection.execute(
            update(epochs).where(epochs.c.id == epoch_id, epochs.c.ended_at.is_(None)).values(ended_at=clock.now())
        )


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
