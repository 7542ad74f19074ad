"""Ends the service when the claim on its database is lost: what it answered from then on could not be billed."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from appliance.base.database_claim import DatabaseClaim
from appliance.metering.ledger import epochs
from appliance.serving.services import Services

log = structlog.get_logger()


async def stop_when_lost(claim: DatabaseClaim, services: Services, stop: Callable[[], None]) -> str:
    """Wait until `claim` is lost and return why; by then live requests were told to end, none can begin, and `stop` was called.

    The same is done when the watch ends in any other way: nothing is served while nobody watches the claim.
    """

    async def go_on() -> bool:
        # A command may have changed rows while nobody held the database.
        for cached in (services.db.principals, services.db.webhooks):
            cached.bump()
        services.prices.clear_cache()
        return await epochs.is_open(services.db, services.epoch_id)

    try:
        reason = await claim.lost(go_on)
    finally:
        services.generations.end_all()
        stop()
    log.error("the claim on the database is lost", reason=reason)
    return f"{reason}; this one has ended its requests and stopped"
