"""Stops the service when the claim on its database is lost, because later requests could not be billed."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from appliance.base.database_claim import DatabaseClaim
from appliance.metering.ledger import epochs
from appliance.serving.services import Services

log = structlog.get_logger()


async def stop_when_claim_lost(claim: DatabaseClaim, services: Services, stop: Callable[[], None]) -> str:
    """Wait until `claim` is lost, end all requests, refuse new ones, call `stop`, and return why the claim was lost.

    Requests are also ended if the wait is cancelled or fails: nothing is served while the claim is not watched.
    """

    async def may_continue() -> bool:
        # A command may have changed rows while the database was unclaimed.
        for cached in (services.db.principal_changes, services.db.webhook_changes):
            cached.bump()
        services.prices.clear_cache()
        return await epochs.is_open(services.db, services.epoch_id)

    try:
        reason = await claim.wait_until_lost(may_continue)
    finally:
        services.generations.end_all()
        stop()
    log.error("the claim on the database is lost", reason=reason)
    return f"{reason}; this one has ended its requests and stopped"
