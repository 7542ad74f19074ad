"""What owners of limits have used on given days: one statement over the ledger's daily sums. Knows no limits.

The statement lists each billing day's start instead of a range: then both databases seek in the index to one owner's sums of
each day and read no others.
"""

from __future__ import annotations

from calendar import monthrange
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from datetime import date, datetime, timedelta
from typing import Any

from sqlalchemy import Row, Select, String, Table, and_, case, func, literal, select, union_all
from sqlalchemy.sql.selectable import CompoundSelect

from appliance.base.tables import api_keys, usage_appliance_rollups, usage_rollups
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.rollups import DAY
from appliance.metering.limits.owners import LimitScope, Owner, owners_of

IN_LIST_MAX = 500  # names in one statement; for more owners of a scope, the sums of all its owners are read


def days_of_month(calendar: BillingCalendar, month: date) -> list[datetime]:
    """Return the start of each day of the month whose first day is `month`."""
    num_days = monthrange(month.year, month.month)[1]
    return [calendar.day_start(month + timedelta(days=index)) for index in range(num_days)]


def sums_query(
    owners: Iterable[Owner], days: Sequence[datetime], *, tokens_since: datetime | None = None
) -> CompoundSelect[Any]:
    """Return the query for the sums of `owners` (not empty), grouped by scope, owner ids, model and currency.

    A row has `tokens`, only of days from `tokens_since` on if given, and the cost as `high` and `low`.
    """
    named: defaultdict[LimitScope, set[str]] = defaultdict(set)
    for owner in owners:
        named[owner.scope].add((owner.model or "") if owner.scope == "model" else owner.id)
    return union_all(*(_sums(scope, sorted(names), days, tokens_since) for scope, names in named.items()))


def rows_by_owner(rows: Iterable[Row[Any]], owners: Container[Owner]) -> Iterator[tuple[Owner, Row[Any]]]:
    """Yield each row of `sums_query` with each of `owners` that it belongs to."""
    for row in rows:
        for owner in owners_of(row.tenant_id, row.key_id, row.model):
            if owner.scope == row.scope and owner in owners:
                yield owner, row


def _sums(scope: LimitScope, names: list[str], days: Sequence[datetime], tokens_since: datetime | None) -> Select[Any]:
    """Return the query for the sums of the owners of one scope: of all its owners if there are too many `names` to list."""
    table: Table = usage_appliance_rollups if scope == "model" else usage_rollups
    columns, empty = table.c, literal("", String())
    tokens = columns.prompt_tokens + columns.completion_tokens
    keys = [
        empty.label("tenant_id") if scope == "model" else columns.tenant_id,
        columns.key_id if scope == "key" else empty.label("key_id"),
        columns.model,
        columns.currency,
    ]
    query = select(
        literal(scope, String()).label("scope"),
        *keys,
        func.sum(tokens if tokens_since is None else case((columns.start_at >= tokens_since, tokens), else_=0)).label("tokens"),
        func.sum(columns.cost_high).label("high"),
        func.sum(columns.cost_low).label("low"),
    ).group_by(*(column for column in keys if column in set(columns)))
    inside = and_(columns.bucket == DAY, columns.start_at.in_(days))
    if len(names) > IN_LIST_MAX:
        return query.where(inside)
    if scope != "key":
        return query.where(inside, (columns.tenant_id if scope == "tenant" else columns.model).in_(names))
    # The sums are indexed by tenant, which is looked up from the key. An outer join fixes the join order.
    own = and_(inside, columns.tenant_id == api_keys.c.tenant_id, columns.key_id == api_keys.c.id)
    rows = query.select_from(api_keys).outerjoin(table, own).where(api_keys.c.id.in_(names))
    return rows.having(func.count(columns.bucket) > 0)
