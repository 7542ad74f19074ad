"""Past usage of owners of limits: today, this month and in the last minute. Allowances start from it.

Only values and the reader's protocol; `ledger_sums` implements it.
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
    """The level of a bucket of `capacity` at `saved_at`, in the bucket's `units`, and the usage `since` then as (moment, tokens
    or requests)."""

    capacity: int
    units: int
    saved_at: datetime
    since: tuple[tuple[datetime, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodSums:
    """Past usage of one owner.

    `through_posting` is the posting of the last event in the sums of day and month; `included` are those of the requests passed
    as `ended` that are in them. `recent` has (admitted_at, tokens) of the last minute, for buckets without a saved level.
    """

    tokens_today: int
    cost_month_picos: int
    through_posting: int = 0
    included: frozenset[str] = frozenset()
    recent: tuple[tuple[datetime, int], ...] = ()
    levels: Mapping[LimitKind, SavedLevel] = field(default_factory=dict)
    other_costs_picos: Mapping[str, int] = field(default_factory=dict)


class SumsReader(OutputsReader, Protocol):
    """Source of the past usage of owners that are loaded for the first time."""

    async def read(
        self, currencies: Mapping[Owner, str], at: Moment, ended: Callable[[], Collection[str]]
    ) -> Mapping[Owner, PeriodSums]:
        """Return the sums of billed events of each owner, with costs in its currency, and which of the requests `ended` they
        include. `ended` is called after the snapshot is taken, so that it can name every request that the snapshot may hold."""
        ...
