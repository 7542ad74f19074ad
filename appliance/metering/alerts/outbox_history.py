"""Forgets alerts that were delivered, or given up, longer ago than the operator keeps them. Pending ones are never touched.

A row also prevents a second alert about the same event, so it is kept as long as that event could alert again: a threshold of a
month's budget until the following month is over, an expiring key until it has expired.
"""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import delete, or_, select

from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.tables import outbox

KEEP_DAYS_MIN = 65  # longer than two months, and than the longest retry
BATCH_ROWS = 500
BATCHES_MAX = 20
INTERVAL_S = 3600.0  # no index finds old rows, so each look reads the whole table


class OutboxHistory:
    """Prunes the outbox to the last `keep_days`, at least KEEP_DAYS_MIN."""

    def __init__(self, db: Database, clock: Clock, *, keep_days: int) -> None:
        self._db = db
        self._clock = clock
        self._keep = timedelta(days=max(keep_days, KEEP_DAYS_MIN))
        self._due_s = 0.0

    async def prune(self, batches_max: int = BATCHES_MAX) -> int:
        """Remove messages that ended before the time that is kept, and return how many; looks once every INTERVAL_S.

        Each batch is a transaction of its own, and a call ends after `batches_max` of them; the next call goes on.
        """
        now_s = self._clock.monotonic_s()
        if now_s < self._due_s:
            return 0
        total = 0
        for _ in range(batches_max):
            count = await self._prune_some()
            total += count
            if count < BATCH_ROWS:
                self._due_s = now_s + INTERVAL_S
                break
        return total

    async def _prune_some(self) -> int:
        kept_from = self._clock.now() - self._keep
        old = (
            select(outbox.c.id)
            .where(outbox.c.created_at < kept_from, outbox.c.next_attempt_at.is_(None))
            .where(or_(outbox.c.delivered_at.is_(None), outbox.c.delivered_at < kept_from))
            .order_by(outbox.c.id)
            .limit(BATCH_ROWS)
        )
        async with self._db.reading() as connection:
            message_ids = (await connection.execute(old)).scalars().all()
        if not message_ids:
            return 0
        ended = delete(outbox).where(outbox.c.id.in_(message_ids), outbox.c.next_attempt_at.is_(None))
        async with self._db.writing() as connection:
            return (await connection.execute(ended)).rowcount
