"""What owners have used in a day or a month, summed from the ledger's sums by day. Knows no thresholds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.sql.selectable import CompoundSelect

from appliance.metering.alerts.plans import Period, Plan
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.rollups import join_sum
from appliance.metering.limits.owner_sums import days_of_month, spread, sums_query
from appliance.metering.limits.quotas import Owner


def used_by(connection: Connection, calendar: BillingCalendar, period: Period, plans: Mapping[Owner, Plan]) -> Counter[Owner]:
    """Return what each owner of `plans` has used in `period` that counts, in one statement."""
    used: Counter[Owner] = Counter()
    rows = connection.execute(used_query(calendar, period, plans)) if plans else ()
    for owner, row in spread(rows, plans):
        cost_picos = join_sum(row.high, row.low)
        used[owner] += plans[owner].counted(period.kind, int(row.tokens), cost_picos, row.currency)
    return used


def used_query(calendar: BillingCalendar, period: Period, plans: Mapping[Owner, Plan]) -> CompoundSelect[Any]:
    """Return the query for the sums of the owners of `plans`, who are some."""
    is_month = period.kind == "budget"
    return sums_query(plans, days_of_month(calendar, period.start) if is_month else [calendar.day_start(period.start)])
