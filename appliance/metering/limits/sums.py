"""What owners of limits had used today, this month and in the last minute when they were met: admission counts on from there.

Values, and where they come from; `ledger_sums` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Protocol

from appliance.metering.limits.decisions import LimitKind
from appliance.metering.limits.output_estimates import OutputsReader
from appliance.metering.limits.owners import Owner
from appliance.metering.limits.windows import Moment

RECENT = timedelta(minutes=1)
"""After this long a bucket is full again, whatever was taken from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedLevel:
    """A bucket of `capacity` as it was at `saved_at`, in the bucket's own `units`, and what was used `since` then, as (moment,
    tokens or requests)."""

    capacity: int
    units: int
    saved_at: datetime
    since: tuple[tuple[datetime, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodSums:
    """Tokens of the day, cost of the month, that in other currencies, saved levels of buckets, and (admitted_at, tokens) of the
    last minute for buckets that were never saved. `through_posting` is the last event that stands in the sums of day and month,
    and `counted` are those of the requests that were asked for that do."""

    tokens_today: int
    cost_month_picos: int
    through_posting: int = 0
    counted: frozenset[str] = frozenset()
    recent: tuple[tuple[datetime, int], ...] = ()
    levels: Mapping[LimitKind, SavedLevel] = field(default_factory=dict)
    other_costs_picos: Mapping[str, int] = field(default_factory=dict)


class SumsReader(OutputsReader, Protocol):
    """Where admission gets the sums from when it meets owners for the first time."""

    async def read(
        self, currencies: Mapping[Owner, str], at: Moment, ended: Callable[[], Collection[str]]
    ) -> Mapping[Owner, PeriodSums]:
        """Return the sums of settled events of each owner, and their cost in its currency, and which of the requests `ended`
        stand in them. It is called once the snapshot is taken, so that it can name every request that the snapshot may have."""
        ...
