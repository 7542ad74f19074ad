"""Prunes outbox messages that were delivered or failed longer ago than the retention period. Pending messages are kept.

A row also deduplicates alerts about its event, so it must be kept as long as that event could raise an alert again: a threshold
of a monthly budget until the following month is over, an expiring key until it has expired.
"""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import delete, or_, select

from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.tables import outbox

KEEP_DAYS_MIN = 65  # longer than two months, and longer than all retries take
BATCH_ROWS = 500
BATCHES_MAX = 20
INTERVAL_S = 3600.0  # there is no index for old rows: each run scans the whole table


class OutboxPruner:
    """Prunes messages older than `keep_days`, or KEEP_DAYS_MIN if that is longer."""

    def __init__(self, db: Database, clock: Clock, *, keep_days: int) -> None:
        self._db = db
        self._clock = clock
        self._keep = timedelta(days=max(keep_days, KEEP_DAYS_MIN))
        self._due_s = 0.0

    async def prune(self, batches_max: int = BATCHES_MAX) -> int:
        """Delete old messages and return how many. Once all are deleted, does nothing for INTERVAL_S.

        Each batch is a transaction of its own; a call deletes at most `batches_max` batches, and the next call continues.
        """
        now_s = self._clock.monotonic_s()
        if now_s < self._due_s:
            return 0
        total = 0
        for _ in range(batches_max):
            count = await self._prune_batch()
            total += count
            if count < BATCH_ROWS:
                self._due_s = now_s + INTERVAL_S
                break
        return total

    async def _prune_batch(self) -> int:
        kept_from = self._clock.now() - self._keep
        old = (
            select(outbox.c.id)
            .where(outbox.c.created_at < kept_from, outbox.c.next_attempt_at.is_(None))
            .where(or_(outbox.c.delivered_at.is_(None), outbox.c.delivered_at < kept_from))
            .limit(BATCH_ROWS)
        )
        async with self._db.reading() as connection:
            message_ids = (await connection.execute(old)).scalars().all()
        if not message_ids:
            return 0
        ended = delete(outbox).where(outbox.c.id.in_(message_ids), outbox.c.next_attempt_at.is_(None))
        async with self._db.writing() as connection:
            return (await connection.execute(ended)).rowcount
