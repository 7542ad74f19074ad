"""Whether the database accepts writes, checked at most once per CHECK_INTERVAL_S however often it is asked, and how many
requests an outage fails."""

from __future__ import annotations

import asyncio

import structlog
from sqlalchemy.exc import SQLAlchemyError

from appliance.base.awake_time import done_within
from appliance.base.clock import Clock
from appliance.base.consecutive_failures import ConsecutiveFailures
from appliance.base.db import Database
from appliance.telemetry.readings import DatabaseReading

CHECK_INTERVAL_S = 5.0
CHECK_TIMEOUT_S = 3.0

log = structlog.get_logger()


class DatabaseWatch:
    """Caches the result of the last check."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock
        self._checked_s: float | None = None
        self._problem: str | None = None
        self._lock = asyncio.Lock()
        self._failed_requests = ConsecutiveFailures(clock.monotonic_s)

    async def problem(self) -> str | None:
        """Return why writes fail, or None if they succeed. For the log only: the driver's message may contain paths."""
        async with self._lock:
            now_s = self._clock.monotonic_s()
            if self._checked_s is None or now_s - self._checked_s >= CHECK_INTERVAL_S:
                previous, self._problem = self._problem, await self._check()
                if self._problem != previous:
                    event = "database is not writable" if self._problem else "database is writable again"
                    log.warning(event, reason=self._problem)
                if self._problem is None and (number := self._failed_requests.end()):
                    log.warning("works again", after="request failed", failures=number)
                self._checked_s = now_s
            return self._problem

    def count_failed_request(self) -> int:
        """Count a request that an outage of the database failed. Return how many there have been since the last check that
        succeeded if this one is to be logged, else 0: a traceback for each could be thousands a second."""
        return self._failed_requests.count()

    async def reading(self) -> DatabaseReading:
        """Return kind and health of the database for the live pages."""
        return DatabaseReading(kind=self._db.kind, ok=await self.problem() is None)

    async def _check(self) -> str | None:
        ping = asyncio.create_task(self._db.ping())
        try:
            if not await done_within(ping, CHECK_TIMEOUT_S):
                return f"no write within {CHECK_TIMEOUT_S:g} s"
            await ping
        except (SQLAlchemyError, OSError) as error:
            return f"not writable: {error}"
        finally:
            ping.cancel()
        return None
