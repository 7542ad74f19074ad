"""The SQL of usage reports: one query for a whole report, and one for a page that reads little more than the page.

The *row key* of a report row is the beginning of its bucket, its group columns (tenant, key, model) and its currency. Rows are
ordered by row key, which is also the order of the rollups as far as both have the same columns. So a page is read from the end
of the previous page to its own last row, however many rows precede or follow it:

    grouped by all columns             the rollups are the rows: the first ones after the row key, and no more
    grouped by some, or few in filter  the first row keys by the columns that both begin with, then only the sums of those

A report by neither tenant nor key reads the rollups of the appliance, which have a row per model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from itertools import takewhile
from typing import Any, Literal

from sqlalchemy import (
    Column,
    ColumnElement,
    ScalarSelect,
    Select,
    Subquery,
    Table,
    and_,
    case,
    func,
    literal,
    or_,
    select,
    tuple_,
    union,
    union_all,
)

from appliance.base.tables import UtcDateTime, api_keys, usage_appliance_rollups, usage_events, usage_rollups
from appliance.metering.ledger.records import BILLED
from appliance.metering.ledger.rollups import COUNTS, SPLIT, event_counts
from appliance.metering.usage_segments import EVENT, Segment

Measure = Literal["cost", "tokens", "requests"]  # tokens: prompt and output together
OWNER_COLUMNS = ("tenant_id", "key_id", "model")
_COLUMNS_OVER_TENANTS = ("model",)
OWNERS_MAX = 20  # with filters on more tenants or keys than this, the first row keys are not searched for each of them
PROBES_MAX = 20_000  # with more index probes than this, the rollups of a period are scanned instead


@dataclass(frozen=True, kw_only=True)
class ReportScope:
    """What a report groups by and filters by: `columns` are the group columns, `filters` the allowed values by column."""

    columns: tuple[str, ...]
    filters: Mapping[str, Collection[str]]

    @cached_property
    def key_columns(self) -> tuple[str, ...]:
        """The group columns in the row key. Rows by API key are ordered by tenant first, like the rollups; a key has one
        tenant, so this adds no rows."""
        names = {*self.columns, "tenant_id"} if "key_id" in self.columns else set(self.columns)
        return tuple(name for name in OWNER_COLUMNS if name in names)

    @property
    def index_probes(self) -> float:
        """The number of index probes per bucket: one for each tenant in the filters and, within it, each key."""
        tenants, keys = (len(self.filters[name]) if name in self.filters else None for name in ("tenant_id", "key_id"))
        if tenants is None:
            return math.inf if keys is None else keys * keys
        return tenants * (keys or 1)

    @property
    def table(self) -> Table:
        """The rollup table to read."""
        return usage_appliance_rollups if {*self.columns, *self.filters} <= set(_COLUMNS_OVER_TENANTS) else usage_rollups

    def conditions(self, table: Table) -> list[ColumnElement[bool]]:
        """Return the filters as conditions on `table`, including the tenants of keys, because rollups are ordered by tenant."""
        conditions = [_is_one_of(table.c[name], sorted(values)) for name, values in self.filters.items()]
        keys = sorted(self.filters.get("key_id", ()))
        if len(keys) > OWNERS_MAX:
            conditions.append(table.c.tenant_id.in_(select(api_keys.c.tenant_id).where(api_keys.c.id.in_(keys))))
        elif keys:
            # One subquery per key: PostgreSQL evaluates them first and begins the index scan at their results.
            conditions.append(_is_one_of(table.c.tenant_id, [tenant_id_of_key(key_id) for key_id in keys]))
        return conditions

    def split(self) -> list[ReportScope]:
        """Return one scope per key in the filters, or else per tenant; empty if there is no such filter or more than
        OWNERS_MAX values."""
        for name in ("key_id", "tenant_id"):
            values = self.filters.get(name, ())
            if 1 <= len(values) <= OWNERS_MAX:
                return [replace(self, filters={**self.filters, name: {value}}) for value in sorted(values)]
        return []


@dataclass(frozen=True, slots=True)
class RowKey:
    """The row key of a report row: the beginning of its bucket, then its group columns and its currency."""

    start_at: datetime
    names: tuple[str, ...]


def tenant_id_of_key(key_id: str) -> ScalarSelect[str]:
    """Return a subquery for the tenant of an API key, for queries on tables ordered by tenant."""
    return select(api_keys.c.tenant_id).where(api_keys.c.id == key_id).scalar_subquery()


def report_query(segments: Sequence[Segment], scope: ReportScope) -> Select[Any]:
    """Return the query for all rows of a report, in row key order."""
    return _add_segments([_segment_sums(segment, scope, scope.key_columns) for segment in segments], scope)


def page_query(segments: Sequence[Segment], scope: ReportScope, rows_max: int, after: RowKey | None) -> Select[Any]:
    """Return the query for the first `rows_max` rows of a report after the row key `after` (None: from the beginning).

    `segments`, at least one, are those that may contain later rows.
    """
    parts = [
        _segment_page(segment, scope, rows_max, after)
        if segment.report_bucket is None
        else _segment_sums(segment, scope, scope.key_columns)
        for segment in segments
    ]
    return _add_segments(parts, scope, after).limit(rows_max)


def totals_query(
    segments: Sequence[Segment], scope: ReportScope, *, measure: Measure = "cost", currency: str | None = None
) -> Select[Any]:
    """Return the query for sums over all segments per group and currency, the largest in `measure` first.

    Amounts in different currencies cannot be compared: by cost, rows in `currency` come first, then the other currencies in
    turn. All segments are put in one bucket, so that no sums are split by bucket. API keys are grouped without their tenant:
    otherwise PostgreSQL expects a group for every key in every tenant, too many to aggregate without sorting.
    """
    whole = [replace(segment, report_bucket=segments[0].start) for segment in segments]
    parts = union_all(*(_segment_sums(segment, scope, scope.columns) for segment in whole)).subquery("parts")
    keys = [*(parts.c[name] for name in scope.columns), parts.c.currency]
    sums = {name: func.sum(parts.c[name]).label(name) for name in COUNTS}
    # Beyond 64 bits SQLite computes with floats, which are exact enough for sorting.
    cost = func.sum(parts.c.cost_high) * SPLIT + func.sum(parts.c.cost_low)
    others = [] if currency is None else [case((parts.c.currency == currency, 0), else_=1), parts.c.currency]
    largest: dict[Measure, list[ColumnElement[Any]]] = {
        "cost": [*others, cost.desc()],
        "tokens": [(sums["prompt_tokens"] + sums["completion_tokens"]).desc()],
        "requests": [sums["requests"].desc()],
    }
    order = [*largest[measure], sums["completion_tokens"].desc(), *keys]
    return select(*keys, *sums.values()).group_by(*keys).order_by(*order)


def _add_segments(parts: Sequence[Select[Any]], scope: ReportScope, after: RowKey | None = None) -> Select[Any]:
    rows = union_all(*parts).subquery("parts")
    row_key = [rows.c[name] for name in ("start_at", *scope.key_columns, "currency")]
    query = select(*row_key, *(func.sum(rows.c[name]).label(name) for name in COUNTS)).group_by(*row_key).order_by(*row_key)
    return query if after is None else query.where(_tuple(row_key) > _tuple(_literals(after)))


def _segment_sums(segment: Segment, scope: ReportScope, columns: Sequence[str]) -> Select[Any]:
    """Return the query for the sums of a segment by `columns`, per bucket of the report."""
    if segment.level == EVENT:
        table: Table = usage_events
        moment: ColumnElement[Any] = usage_events.c.admitted_at
        is_counted: ColumnElement[bool] = usage_events.c.status.in_(BILLED)
        counts = event_counts()
    else:
        table = scope.table
        moment, is_counted, counts = table.c.start_at, table.c.bucket == segment.level, _count_sums(table)
    start = moment if segment.report_bucket is None else literal(segment.report_bucket, UtcDateTime())
    names = [table.c[name] for name in (*columns, "currency")]
    conditions = [is_counted, *_time_conditions(moment, segment, segment.start, scope), *scope.conditions(table)]
    query = select(start.label("start_at"), *names, *counts).where(*conditions)
    return query.group_by(*([moment] if segment.report_bucket is None else []), *names)


def _time_conditions(
    moment: ColumnElement[Any], segment: Segment, begin: datetime, scope: ReportScope
) -> list[ColumnElement[bool]]:
    """Return the conditions that `moment` is in the segment, from `begin` on.

    For few tenants or keys the start times are listed one by one: then SQLite, which keeps no statistics, seeks each tenant's
    rollups by the primary key instead of scanning those of all tenants in the period.
    """
    if segment.starts and scope.index_probes * len(segment.starts) <= PROBES_MAX:
        return [moment.in_([start for start in segment.starts if start >= begin])]
    return [moment >= begin, moment < segment.end]


def _segment_page(segment: Segment, scope: ReportScope, rows_max: int, after: RowKey | None) -> Select[Any]:
    """Return the query for the sums of at least the first `rows_max` row keys after `after`, in a segment of whole buckets."""
    table = scope.table
    owner = _COLUMNS_OVER_TENANTS if table is usage_appliance_rollups else OWNER_COLUMNS
    row_key = [table.c[name] for name in ("start_at", *scope.key_columns, "currency")]
    if scope.key_columns == owner and not scope.split():
        begin = segment.start if after is None else max(segment.start, after.start_at)
        conditions = [table.c.bucket == segment.level, *_time_conditions(table.c.start_at, segment, begin, scope)]
        after_key = [] if after is None else [_tuple(row_key) > _tuple(_literals(after))]
        sums = [table.c[name] for name in COUNTS]
        query = select(*row_key, *sums).where(*conditions, *after_key, *scope.conditions(table)).order_by(*row_key)
        return select(query.limit(rows_max).subquery("rows"))
    key_prefix = ("start_at", *takewhile(lambda name: name in scope.key_columns, owner))
    first = _first_keys(key_prefix, segment, scope, rows_max, after)
    same = and_(table.c.bucket == segment.level, *(table.c[name] == first.c[name] for name in key_prefix))
    # Every row has a match, so this equals an inner join; the outer join fixes which side is read first.
    rows = first.outerjoin(table, and_(same, *scope.conditions(table)))
    return select(*row_key, *_count_sums(table)).select_from(rows).group_by(*row_key)


def _first_keys(names: Sequence[str], segment: Segment, scope: ReportScope, rows_max: int, after: RowKey | None) -> Subquery:
    """Return the first distinct values of the columns `names`, from those of `after` on, which may have no rows left.

    The first of all are among the first of each tenant or key, and those of one tenant are adjacent in an index.
    """
    table, split = scope.table, scope.split()
    begin = segment.start if after is None else max(segment.start, after.start_at)
    columns = [table.c[name] for name in names]
    after_key = [] if after is None else [_not_before(columns, after, seek=not split)]
    firsts = []
    for one in split or [scope]:
        in_time = [table.c.bucket == segment.level, *_time_conditions(table.c.start_at, segment, begin, one)]
        conditions = [*in_time, *one.conditions(table), *after_key]
        first = select(*columns).where(*conditions).distinct().order_by(*columns).limit(rows_max + 1)
        firsts.append(select(first.subquery()))
    all_firsts = union(*firsts).subquery("firsts")
    return select(all_firsts).order_by(*all_firsts.c).limit(rows_max + 1).subquery("first")


def _not_before(columns: Sequence[Column[Any]], row_key: RowKey, *, seek: bool) -> ColumnElement[bool]:
    """Return the condition that `columns` are equal to or after those of `row_key`.

    With `seek`, SQLite begins there in an index of these columns, whichever other indexes exist; without `seek` the condition
    is written so that SQLite cannot use it for a seek.
    """
    values = _literals(row_key)[: len(columns)]
    not_before: ColumnElement[bool] = _tuple(columns) >= _tuple(values)
    return not_before if seek else or_(columns[0] > values[0], not_before)


def _count_sums(table: Table) -> list[ColumnElement[Any]]:
    return [func.sum(table.c[name]).label(name) for name in COUNTS]


def _literals(row_key: RowKey) -> list[ColumnElement[Any]]:
    return [literal(row_key.start_at, UtcDateTime()), *map(literal, row_key.names)]


def _tuple(columns: Sequence[ColumnElement[Any]]) -> Any:
    return tuple_(*columns)


def _is_one_of(column: ColumnElement[Any], values: Sequence[Any]) -> ColumnElement[bool]:
    return column == values[0] if len(values) == 1 else column.in_(values)
