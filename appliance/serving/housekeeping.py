"""Background upkeep: saves when keys were last used, and deletes old requests and alerts."""

from __future__ import annotations

import structlog

from appliance.base.background import Background, repeat
from appliance.metering.alerts.outbox_pruning import OutboxPruner
from appliance.metering.past_request_pruning import PastRequestPruner
from appliance.tenancy.keys import Keys

INTERVAL_S = 10.0

log = structlog.get_logger()


class Housekeeping:
    """Runs every INTERVAL_S and does a bounded amount of work each time."""

    def __init__(self, keys: Keys, requests: PastRequestPruner, alerts: OutboxPruner) -> None:
        self._keys = keys
        self._requests = requests
        self._alerts = alerts
        self._rounds = Background(
            "housekeeping", lambda: repeat(self.work, INTERVAL_S, failure="housekeeping failed; it will be retried")
        )

    def start(self) -> None:
        """Start the task."""
        self._rounds.start()

    async def stop(self) -> None:
        """Stop the task."""
        await self._rounds.stop()

    async def work(self) -> None:
        """Do one round of upkeep."""
        await self._keys.flush_last_used()
        for what, history in (("requests", self._requests), ("alerts", self._alerts)):
            pruned = await history.prune()
            if pruned:
                log.info("old records deleted", of=what, count=pruned)
