"""Ledgers as admission reads them at its first meeting with an owner: without a database."""

from __future__ import annotations

from datetime import datetime

from appliance.metering.limits.quotas import Moment, Owner
from appliance.metering.limits.sums import PeriodSums


class NothingYet:
    """A ledger without events."""

    async def read(self, owner: Owner, currency: str, at: Moment) -> PeriodSums:
        """Return that nothing was used."""
        return PeriodSums(tokens_today=0, cost_month_picos=0)

    async def outputs(self, key_id: str, model: str, before: datetime) -> list[int]:
        """Return that nobody ever got an answer."""
        return []
