"""What owners have used in a day or a month, summed from the ledger's sums by day. Knows no thresholds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from datetime import datetime

from sqlalchemy import ColumnElement, Connection, func, or_, select

from appliance.base.tables import usage_rollups
from appliance.metering.alerts.plans import Period, Plan
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.rollups import DAY, join_sum
from appliance.metering.limits.quotas import Owner
from appliance.metering.limits.rules import owners_of

NAMED_MAX = 500  # of more owners than that the sums of everybody are read: a statement takes so many names


def used_by(connection: Connection, calendar: BillingCalendar, period: Period, plans: Mapping[Owner, Plan]) -> Counter[Owner]:
    """Return what each owner of `plans` has used in `period` that counts, in one statement."""
    begin, end = _bounds(calendar, period)
    columns = usage_rollups.c
    place = columns.tenant_id, columns.key_id, columns.model, columns.currency
    query = (
        select(
            *place,
            func.sum(columns.prompt_tokens + columns.completion_tokens).label("tokens"),
            func.sum(columns.cost_high).label("high"),
            func.sum(columns.cost_low).label("low"),
        )
        .where(columns.bucket == DAY, columns.start_at >= begin, columns.start_at < end)
        .group_by(*place)
    )
    if len(plans) <= NAMED_MAX:
        query = query.where(_naming(plans))
    used: Counter[Owner] = Counter()
    for row in connection.execute(query):
        for owner in owners_of(row.tenant_id, row.key_id, row.model):
            plan = plans.get(owner)
            if plan is not None:
                cost_picos = join_sum(row.high, row.low)
                used[owner] += plan.counted(period.kind, int(row.tokens), cost_picos, row.currency)
    return used


def _bounds(calendar: BillingCalendar, period: Period) -> tuple[datetime, datetime]:
    if period.kind == "budget":
        return calendar.month_start(period.start), calendar.next_month_start(period.start)
    return calendar.day_start(period.start), calendar.next_day_start(period.start)


def _naming(plans: Mapping[Owner, Plan]) -> ColumnElement[bool]:
    """Return the condition on rows that may count for one of the owners."""
    columns = usage_rollups.c
    column = {"tenant": columns.tenant_id, "key": columns.key_id, "model": columns.model}
    names: dict[str, set[str | None]] = defaultdict(set)
    for owner in plans:
        names[owner.scope].add(owner.model if owner.scope == "model" else owner.id)
    return or_(*(column[scope].in_(sorted(named, key=str)) for scope, named in names.items()))
