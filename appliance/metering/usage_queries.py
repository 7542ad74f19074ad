"""The statements of usage reports: one for a whole report, and one for a page of it that reads little more than the page.

A row is identified by its *place*: the beginning of its bucket, the requested columns of the owner, and the currency. Rows come
in the order of their places, which is also the order of the sums as far as both have the same columns. So a page is read from
where the previous one ended up to its own last row, however much precedes or follows it:

    every column of the owner   the sums are the rows: the first ones after the place, and no more
    some, or of a few owners    the first places by the columns that both begin with, then only the sums of those places

A report by neither tenant nor key is read from the sums of the box, which have a row for each model.
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

from appliance.base.tables import UtcDateTime, api_keys, usage_box_rollups, usage_events, usage_rollups
from appliance.metering.ledger.rollups import COUNTS, SETTLED, SPLIT, event_counts
from appliance.metering.usage_cover import EVENT, Segment

Measure = Literal["cost", "tokens", "requests"]  # tokens: prompt and output together
OWNER = ("tenant_id", "key_id", "model")
_BOX_OWNER = ("model",)
OWNERS_MAX = 20  # for more tenants or keys than this, the first places are not searched one by one
PROBES_MAX = 20_000  # instead of more probes of an index than this, the sums of a period are read in sequence


@dataclass(frozen=True, kw_only=True)
class Owners:
    """The owners in a report: the columns that distinguish rows, and for each restricted column the values that count."""

    columns: tuple[str, ...]
    wanted: Mapping[str, Collection[str]]

    @cached_property
    def place(self) -> tuple[str, ...]:
        """The owner's columns in a row's place. A key belongs to one tenant: rows by key are ordered by tenant first, like the
        sums."""
        told_apart = {*self.columns, "tenant_id"} if "key_id" in self.columns else set(self.columns)
        return tuple(name for name in OWNER if name in told_apart)

    @property
    def probes(self) -> float:
        """How many index probes a database makes per bucket: one for each tenant and, within it, each key."""
        tenants, keys = (len(self.wanted[name]) if name in self.wanted else None for name in ("tenant_id", "key_id"))
        if tenants is None:
            return math.inf if keys is None else keys * keys
        return tenants * (keys or 1)

    @property
    def table(self) -> Table:
        """The table of sums that is read."""
        return usage_box_rollups if {*self.columns, *self.wanted} <= set(_BOX_OWNER) else usage_rollups

    def conditions(self, table: Table) -> list[ColumnElement[bool]]:
        """Return the conditions on rows of `table`. The tenants of keys are added, because sums are ordered by tenant."""
        met = [_is_one_of(table.c[name], sorted(values)) for name, values in self.wanted.items()]
        keys = sorted(self.wanted.get("key_id", ()))
        if len(keys) > OWNERS_MAX:
            met.append(table.c.tenant_id.in_(select(api_keys.c.tenant_id).where(api_keys.c.id.in_(keys))))
        elif keys:
            # A subquery for each: PostgreSQL evaluates them before it decides where in the index to begin.
            met.append(_is_one_of(table.c.tenant_id, [tenant_of_key(key_id) for key_id in keys]))
        return met

    def one_by_one(self) -> list[Owners]:
        """Return these owners restricted to each single key, or else to each single tenant; empty if not restricted or too
        many."""
        for name in ("key_id", "tenant_id"):
            values = self.wanted.get(name, ())
            if 1 <= len(values) <= OWNERS_MAX:
                return [replace(self, wanted={**self.wanted, name: {value}}) for value in sorted(values)]
        return []


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a row: the beginning of its bucket, then its owner's columns and its currency."""

    start_at: datetime
    names: tuple[str, ...]


def tenant_of_key(key_id: str) -> ScalarSelect[str]:
    """Return a subquery for the tenant of a key, for queries of rows that are ordered by tenant."""
    return select(api_keys.c.tenant_id).where(api_keys.c.id == key_id).scalar_subquery()


def report_query(segments: Sequence[Segment], owners: Owners) -> Select[Any]:
    """Return the query for all rows of a report, in the order of their places."""
    return _added_up([_part(segment, owners, owners.place) for segment in segments], owners)


def page_query(segments: Sequence[Segment], owners: Owners, rows_max: int, after: Place | None) -> Select[Any]:
    """Return the query for the first `rows_max` rows of a report after the place `after`.

    `segments` are those that reach beyond it, at least one.
    """
    parts = [
        _part(segment, owners, owners.place) if segment.within is not None else _page_part(segment, owners, rows_max, after)
        for segment in segments
    ]
    return _added_up(parts, owners, after).limit(rows_max)


def totals_query(
    segments: Sequence[Segment], owners: Owners, *, measure: Measure = "cost", currency: str | None = None
) -> Select[Any]:
    """Return the query for sums over all segments per group and currency, the largest in `measure` first.

    Amounts in two currencies do not compare: by cost, those in `currency` come first, then one currency after the other.

    All segments are made one bucket: otherwise each would be sorted by its own buckets first. A key is grouped without its
    tenant: otherwise PostgreSQL expects a group for every key in every tenant, too many to add up without sorting.
    """
    whole = [replace(segment, within=segments[0].start) for segment in segments]
    parts = union_all(*(_part(segment, owners, owners.columns) for segment in whole)).subquery("parts")
    keys = [*(parts.c[name] for name in owners.columns), parts.c.currency]
    sums = {name: func.sum(parts.c[name]).label(name) for name in COUNTS}
    # Beyond 64 bits SQLite continues with a float, which is good enough for sorting.
    cost = func.sum(parts.c.cost_high) * SPLIT + func.sum(parts.c.cost_low)
    others = [] if currency is None else [case((parts.c.currency == currency, 0), else_=1), parts.c.currency]
    largest: dict[Measure, list[ColumnElement[Any]]] = {
        "cost": [*others, cost.desc()],
        "tokens": [(sums["prompt_tokens"] + sums["completion_tokens"]).desc()],
        "requests": [sums["requests"].desc()],
    }
    order = [*largest[measure], sums["completion_tokens"].desc(), *keys]
    return select(*keys, *sums.values()).group_by(*keys).order_by(*order)


def _added_up(parts: Sequence[Select[Any]], owners: Owners, after: Place | None = None) -> Select[Any]:
    rows = union_all(*parts).subquery("parts")
    place = [rows.c[name] for name in ("start_at", *owners.place, "currency")]
    query = select(*place, *(func.sum(rows.c[name]).label(name) for name in COUNTS)).group_by(*place).order_by(*place)
    return query if after is None else query.where(_tuple(place) > _tuple(_literals(after)))


def _part(segment: Segment, owners: Owners, columns: Sequence[str]) -> Select[Any]:
    """Return the sums of a segment by the owner's `columns`: per bucket, or all in the one bucket that contains it."""
    if segment.level == EVENT:
        table: Table = usage_events
        moment: ColumnElement[Any] = usage_events.c.admitted_at
        belongs: ColumnElement[bool] = usage_events.c.status.in_(SETTLED)
        counts = event_counts()
    else:
        table = owners.table
        moment, belongs, counts = table.c.start_at, table.c.bucket == segment.level, _sums(table)
    start = moment if segment.within is None else literal(segment.within, UtcDateTime())
    names = [table.c[name] for name in (*columns, "currency")]
    inside = [belongs, *_moments(moment, segment, segment.start, owners), *owners.conditions(table)]
    query = select(start.label("start_at"), *names, *counts).where(*inside)
    return query.group_by(*([moment] if segment.within is None else []), *names)


def _moments(moment: ColumnElement[Any], segment: Segment, begin: datetime, owners: Owners) -> list[ColumnElement[bool]]:
    """Return the conditions that `moment` is in the segment, from `begin` on.

    For a few tenants or keys, the beginnings are listed one by one: then SQLite, which keeps no statistics, goes from one
    tenant's sums to the next by the primary key, instead of reading everybody's sums of the period.
    """
    if segment.starts and owners.probes * len(segment.starts) <= PROBES_MAX:
        return [moment.in_([start for start in segment.starts if start >= begin])]
    return [moment >= begin, moment < segment.end]


def _page_part(segment: Segment, owners: Owners, rows_max: int, after: Place | None) -> Select[Any]:
    """Return the sums of at least the first `rows_max` places after `after`, in a segment of whole buckets."""
    table = owners.table
    owner = _BOX_OWNER if table is usage_box_rollups else OWNER
    place = [table.c[name] for name in ("start_at", *owners.place, "currency")]
    if owners.place == owner and not owners.one_by_one():
        begin = segment.start if after is None else max(segment.start, after.start_at)
        inside = [table.c.bucket == segment.level, *_moments(table.c.start_at, segment, begin, owners)]
        behind = [] if after is None else [_tuple(place) > _tuple(_literals(after))]
        sums = [table.c[name] for name in COUNTS]
        query = select(*place, *sums).where(*inside, *behind, *owners.conditions(table)).order_by(*place)
        return select(query.limit(rows_max).subquery("rows"))
    begins_with = ("start_at", *takewhile(lambda name: name in owners.place, owner))
    first = _first_places(begins_with, segment, owners, rows_max, after)
    same = and_(table.c.bucket == segment.level, *(table.c[name] == first.c[name] for name in begins_with))
    # Every row has a match, so an inner join would do; the outer join fixes which side is read first.
    rows = first.outerjoin(table, and_(same, *owners.conditions(table)))
    return select(*place, *_sums(table)).select_from(rows).group_by(*place)


def _first_places(names: Sequence[str], segment: Segment, owners: Owners, rows_max: int, after: Place | None) -> Subquery:
    """Return the first places by the columns `names`. That of `after` may be among them with nothing left in it.

    The first of all are among the first of each owner, and those of one tenant are adjacent in an index of places.
    """
    table, one_by_one = owners.table, owners.one_by_one()
    begin = segment.start if after is None else max(segment.start, after.start_at)
    columns = [table.c[name] for name in names]
    behind = [] if after is None else [_not_before(columns, after, seek=not one_by_one)]
    firsts = []
    for one in one_by_one or [owners]:
        inside = [table.c.bucket == segment.level, *_moments(table.c.start_at, segment, begin, one), *one.conditions(table)]
        first = select(*columns).where(*inside, *behind).distinct().order_by(*columns).limit(rows_max + 1)
        firsts.append(select(first.subquery()))
    all_firsts = union(*firsts).subquery("firsts")
    return select(all_firsts).order_by(*all_firsts.c).limit(rows_max + 1).subquery("first")


def _not_before(columns: Sequence[Column[Any]], place: Place, *, seek: bool) -> ColumnElement[bool]:
    """Return the condition that `columns` are not before those of `place`.

    With `seek`, SQLite starts there in an index of these columns, whichever other indexes exist; without `seek` the condition
    is written so that SQLite does not see that it could.
    """
    values = _literals(place)[: len(columns)]
    not_before: ColumnElement[bool] = _tuple(columns) >= _tuple(values)
    return not_before if seek else or_(columns[0] > values[0], not_before)


def _sums(table: Table) -> list[ColumnElement[Any]]:
    return [func.sum(table.c[name]).label(name) for name in COUNTS]


def _literals(place: Place) -> list[ColumnElement[Any]]:
    return [literal(place.start_at, UtcDateTime()), *map(literal, place.names)]


def _tuple(columns: Sequence[ColumnElement[Any]]) -> Any:
    return tuple_(*columns)


def _is_one_of(column: ColumnElement[Any], values: Sequence[Any]) -> ColumnElement[bool]:
    return column == values[0] if len(values) == 1 else column.in_(values)
