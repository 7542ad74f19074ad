"""The sums of an empty ledger, as admission reads them at the first request of an owner, without a database."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import datetime

from appliance.metering.limits.owners import Owner
from appliance.metering.limits.sums import PeriodSums
from appliance.metering.limits.windows import Moment


class EmptySums:
    """A ledger without events."""

    async def read(
        self, currencies: Mapping[Owner, str], at: Moment, ended: Callable[[], Collection[str]]
    ) -> dict[Owner, PeriodSums]:
        """Return zero for each owner."""
        return {owner: PeriodSums(tokens_today=0, cost_month_picos=0) for owner in currencies}

    async def outputs(self, key_id: str, model: str, before: datetime) -> list[int]:
        """Return no past outputs."""
        return []
