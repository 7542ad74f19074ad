"""The statements of usage reports: one for a whole report, and one for a page of it that reads little more than the page.

Rows are told apart by their *place*: the beginning of the bucket, the owner's columns that were asked for, and the currency.
They come in the order of their places, which is that of the sums themselves as far as both have the same columns; so a page
begins where the one before ended and ends with its last row, whatever stands before and behind it:

    every column of the owner   the sums are the rows: the first of them behind the place, and no more
    some, or of a few owners    the first places by the columns that both begin with, then the sums of those places alone

What was asked for neither by tenant nor by key is read from the sums of the box, which have a row for each model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from itertools import takewhile
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    ScalarSelect,
    Select,
    Subquery,
    Table,
    and_,
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

OWNER = ("tenant_id", "key_id", "model")
_BOX_OWNER = ("model",)
OWNERS_MAX = 20  # of more tenants or keys than that, the first places are not looked for one by one
PROBES_MAX = 20_000  # of more places than that in an index the sums of a period are read one after the other


@dataclass(frozen=True, kw_only=True)
class Owners:
    """Whose sums a report has: the columns that tell rows apart, and which values of a column count, where not all do."""

    columns: tuple[str, ...]
    wanted: Mapping[str, Collection[str]]

    @cached_property
    def place(self) -> tuple[str, ...]:
        """The owner's columns of a row's place. A key belongs to one tenant: rows by key lie by tenant, as the sums do."""
        told_apart = {*self.columns, "tenant_id"} if "key_id" in self.columns else set(self.columns)
        return tuple(name for name in OWNER if name in told_apart)

    @property
    def probes(self) -> float:
        """In how many places of a bucket a database looks for the rows: of each tenant, and there of each key."""
        tenants, keys = (len(self.wanted[name]) if name in self.wanted else None for name in ("tenant_id", "key_id"))
        if tenants is None:
            return math.inf if keys is None else keys * keys
        return tenants * (keys or 1)

    @property
    def table(self) -> Table:
        """The sums that are read."""
        return usage_box_rollups if {*self.columns, *self.wanted} <= set(_BOX_OWNER) else usage_rollups

    def conditions(self, table: Table) -> list[ColumnElement[bool]]:
        """Return what rows of `table` have to meet. The tenants of keys are looked up, for sums lie by tenant."""
        met = [_is_one_of(table.c[name], sorted(values)) for name, values in self.wanted.items()]
        keys = sorted(self.wanted.get("key_id", ()))
        if len(keys) > OWNERS_MAX:
            met.append(table.c.tenant_id.in_(select(api_keys.c.tenant_id).where(api_keys.c.id.in_(keys))))
        elif keys:
            # One statement for each: PostgreSQL has the answers before it chooses where to begin.
            met.append(_is_one_of(table.c.tenant_id, [tenant_of_key(key_id) for key_id in keys]))
        return met

    def one_by_one(self) -> list[Owners]:
        """Return each key, or else each tenant, as the only one that is asked for; none where they are all or too many."""
        for name in ("key_id", "tenant_id"):
            values = self.wanted.get(name, ())
            if 1 <= len(values) <= OWNERS_MAX:
                return [replace(self, wanted={**self.wanted, name: {value}}) for value in sorted(values)]
        return []


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a row: where its bucket begins, and its owner's columns and currency."""

    start_at: datetime
    names: tuple[str, ...]


def tenant_of_key(key_id: str) -> ScalarSelect[str]:
    """Return the tenant of a key, for a query of rows that lie by tenant."""
    return select(api_keys.c.tenant_id).where(api_keys.c.id == key_id).scalar_subquery()


def report_query(segments: Sequence[Segment], owners: Owners) -> Select[Any]:
    """Return the query for all rows of a report, in the order of their places."""
    return _added_up([_part(segment, owners, owners.place) for segment in segments], owners)


def page_query(segments: Sequence[Segment], owners: Owners, rows_max: int, after: Place | None) -> Select[Any]:
    """Return the query for the first `rows_max` rows of a report behind the place `after`.

    `segments` are those that reach behind it; there is one at least.
    """
    parts = [
        _part(segment, owners, owners.place) if segment.within is not None else _page_part(segment, owners, rows_max, after)
        for segment in segments
    ]
    return _added_up(parts, owners, after).limit(rows_max)


def totals_query(segments: Sequence[Segment], owners: Owners) -> Select[Any]:
    """Return the query for sums over all segments per group and currency, the dearest first, then the largest.

    All segments are one bucket, or else each would be sorted by its own buckets first; and a key stands without its tenant, for
    PostgreSQL expects groups of every key in every tenant, too many to add up without sorting.
    """
    whole = [replace(segment, within=segments[0].start) for segment in segments]
    parts = union_all(*(_part(segment, owners, owners.columns) for segment in whole)).subquery("parts")
    keys = [*(parts.c[name] for name in owners.columns), parts.c.currency]
    sums = {name: func.sum(parts.c[name]).label(name) for name in COUNTS}
    # Beyond 64 bits SQLite goes on with a float, near enough to sort by.
    cost = func.sum(parts.c.cost_high) * SPLIT + func.sum(parts.c.cost_low)
    order = [cost.desc(), sums["completion_tokens"].desc(), *keys]
    return select(*keys, *sums.values()).group_by(*keys).order_by(*order)


def _added_up(parts: Sequence[Select[Any]], owners: Owners, after: Place | None = None) -> Select[Any]:
    rows = union_all(*parts).subquery("parts")
    place = [rows.c[name] for name in ("start_at", *owners.place, "currency")]
    query = select(*place, *(func.sum(rows.c[name]).label(name) for name in COUNTS)).group_by(*place).order_by(*place)
    return query if after is None else query.where(_tuple(place) > _tuple(_literals(after)))


def _part(segment: Segment, owners: Owners, columns: Sequence[str]) -> Select[Any]:
    """Return the sums of a segment by the owner's `columns`: of its buckets, or of the one bucket that it lies within."""
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
    """Return what says that `moment` lies in the segment, from `begin` on.

    Of a few tenants, or keys, the beginnings are named one by one: so SQLite, which keeps no statistics, goes from one tenant's
    sums to the next by the primary key, where it would read everybody's sums of the period.
    """
    if segment.starts and owners.probes * len(segment.starts) <= PROBES_MAX:
        return [moment.in_([start for start in segment.starts if start >= begin])]
    return [moment >= begin, moment < segment.end]


def _page_part(segment: Segment, owners: Owners, rows_max: int, after: Place | None) -> Select[Any]:
    """Return the sums of at least the first `rows_max` places of a segment of whole buckets, behind `after`."""
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
    # An outer join, of which every row finds another: it says which side comes first.
    rows = first.outerjoin(table, and_(same, *owners.conditions(table)))
    return select(*place, *_sums(table)).select_from(rows).group_by(*place)


def _first_places(names: Sequence[str], segment: Segment, owners: Owners, rows_max: int, after: Place | None) -> Subquery:
    """Return the first places by the columns `names`, of which that of `after` may be one in which nothing is left.

    The first of all are among the first of each owner, and those of a tenant lie together in an index of the places alone.
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
    """Return what says that `columns` are not before those of `place`.

    SQLite enters an index of these columns there, whatever others there are; without `seek` it does not see that it could.
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
