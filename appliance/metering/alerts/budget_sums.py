"""What owners have used in a day or a month, summed from the ledger's sums by day. Knows no thresholds.

Sums by day begin with days of the billing calendar, so the days of a period are named one by one: then both databases go from
one owner's sums of a day to the next, and read nothing of anybody else.
"""

from __future__ import annotations

from calendar import monthrange
from collections import Counter, defaultdict
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Select, String, Table, and_, func, literal, select, union_all
from sqlalchemy.sql.selectable import CompoundSelect

from appliance.base.tables import api_keys, usage_box_rollups, usage_rollups
from appliance.metering.alerts.plans import Period, Plan
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.rollups import DAY, join_sum
from appliance.metering.limits.quotas import LimitScope, Owner
from appliance.metering.limits.rules import owners_of

NAMED_MAX = 500  # of more owners of a scope than that the sums of all are read: a statement takes so many names


def used_by(connection: Connection, calendar: BillingCalendar, period: Period, plans: Mapping[Owner, Plan]) -> Counter[Owner]:
    """Return what each owner of `plans` has used in `period` that counts, in one statement."""
    used: Counter[Owner] = Counter()
    for row in connection.execute(used_query(calendar, period, plans)) if plans else ():
        for owner in owners_of(row.tenant_id, row.key_id, row.model):
            plan = plans.get(owner)
            if plan is not None and owner.scope == row.scope:
                cost_picos = join_sum(row.high, row.low)
                used[owner] += plan.counted(period.kind, int(row.tokens), cost_picos, row.currency)
    return used


def used_query(calendar: BillingCalendar, period: Period, plans: Mapping[Owner, Plan]) -> CompoundSelect[Any]:
    """Return the query for the sums of the owners of `plans`, who are some: of each `scope` by what tells its owners apart."""
    named: defaultdict[LimitScope, set[str]] = defaultdict(set)
    for owner in plans:
        named[owner.scope].add((owner.model or "") if owner.scope == "model" else owner.id)
    days = _days(calendar, period)
    return union_all(*(_sums(scope, sorted(names), days) for scope, names in named.items()))


def _days(calendar: BillingCalendar, period: Period) -> list[datetime]:
    """Return where the days of the period begin."""
    count = monthrange(period.start.year, period.start.month)[1] if period.kind == "budget" else 1
    return [calendar.day_start(period.start + timedelta(days=number)) for number in range(count)]


def _sums(scope: LimitScope, names: list[str], days: list[datetime]) -> Select[Any]:
    """Return the sums of the owners of one scope: all of them, where they are too many to be named."""
    table: Table = usage_box_rollups if scope == "model" else usage_rollups
    columns, nobody = table.c, literal("", String())
    place = [
        nobody.label("tenant_id") if scope == "model" else columns.tenant_id,
        columns.key_id if scope == "key" else nobody.label("key_id"),
        columns.model,
        columns.currency,
    ]
    query = select(
        literal(scope, String()).label("scope"),
        *place,
        func.sum(columns.prompt_tokens + columns.completion_tokens).label("tokens"),
        func.sum(columns.cost_high).label("high"),
        func.sum(columns.cost_low).label("low"),
    ).group_by(*(column for column in place if column in set(columns)))
    inside = and_(columns.bucket == DAY, columns.start_at.in_(days))
    if len(names) > NAMED_MAX:
        return query.where(inside)
    if scope != "key":
        return query.where(inside, (columns.tenant_id if scope == "tenant" else columns.model).in_(names))
    # Sums lie by tenant, and a key says whose it is. The join is an outer one to say which side comes first.
    own = and_(inside, columns.tenant_id == api_keys.c.tenant_id, columns.key_id == api_keys.c.id)
    rows = query.select_from(api_keys).outerjoin(table, own).where(api_keys.c.id.in_(names))
    return rows.having(func.count(columns.bucket) > 0)
