"""Prunes past requests older than the operator's retention period. Usage events, which are money, are kept."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import delete, select

from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.tables import requests

BATCH_ROWS = 500  # a batch blocks other writers for a few milliseconds, which settlements do not notice
BATCHES_MAX = 20


class PastRequestPruner:
    """Prunes requests that were admitted more than `keep_days` ago."""

    def __init__(self, db: Database, clock: Clock, *, keep_days: int) -> None:
        self._db = db
        self._clock = clock
        self._keep = timedelta(days=keep_days)

    async def prune(self, batches_max: int = BATCHES_MAX) -> int:
        """Delete finished requests older than the retention period, and return how many.

        Each batch is a transaction of its own. A call ends after `batches_max` of them; the next call continues.
        """
        total = 0
        for _ in range(batches_max):
            count = await self._prune_batch()
            total += count
            if count < BATCH_ROWS:
                break
        return total

    async def _prune_batch(self) -> int:
        # Unfinished requests have pending events: whatever their age, they are shown until they are settled.
        old = (
            select(requests.c.id)
            .where(requests.c.admitted_at < self._clock.now() - self._keep, requests.c.finished_at.is_not(None))
            .order_by(requests.c.admitted_at)
            .limit(BATCH_ROWS)
        )
        async with self._db.reading() as connection:
            if (await connection.execute(old.limit(1))).first() is None:
                return 0
        async with self._db.writing() as connection:
            result = await connection.execute(delete(requests).where(requests.c.id.in_(old)))
            return result.rowcount
