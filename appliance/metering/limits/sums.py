"""What an owner of limits has used today, this month and in the last minute, read once from the ledger; admission counts on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol

from sqlalchemy import ColumnElement, Select, Table, and_, case, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base import counters
from appliance.base.db import Database
from appliance.base.tables import usage_events, usage_rollups
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.rollups import DAY, SETTLED, join_sum
from appliance.metering.limits import levels as limit_levels
from appliance.metering.limits.expectations import OUTPUTS_KEPT
from appliance.metering.limits.levels import SavedLevel
from appliance.metering.limits.quotas import BUCKET_KINDS, LimitKind, Moment, Owner

RECENT = timedelta(minutes=1)
"""After this long a bucket is full again, whatever was taken from it."""
RECENT_EVENTS_MAX = 20_000
OUTPUTS_READ_MAX = 3 * OUTPUTS_KEPT
SETTLING = timedelta(hours=1)  # a request that its deadline has ended is settled long before


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelNow:
    """How full a bucket was when it was last saved, and what was admitted or settled `since`, as (moment, tokens)."""

    capacity: int
    units: int
    saved_at: datetime
    since: tuple[tuple[datetime, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodSums:
    """Tokens of the day, cost of the month, saved levels of buckets, and (admitted_at, tokens) of the last minute for buckets
    that were never saved. `through_posting` is the last event that stands in the sums of day and month."""

    tokens_today: int
    cost_month_picos: int
    through_posting: int = 0
    recent: tuple[tuple[datetime, int], ...] = ()
    levels: Mapping[LimitKind, LevelNow] = field(default_factory=dict)


class SumsReader(Protocol):
    """Where admission gets the sums from when it meets an owner for the first time."""

    async def read(self, owner: Owner, currency: str, at: Moment) -> PeriodSums:
        """Return the sums of settled events of `owner`, and their cost in `currency`."""
        ...

    async def outputs(self, key_id: str, model: str, before: datetime) -> Sequence[int]:
        """Return the output tokens of the last requests of a key with a model, admitted `before`, at most OUTPUTS_KEPT, oldest
        first."""
        ...


class LedgerSums:
    """Reads the sums by day, the latest usage events and the saved levels. Costs in other currencies do not count."""

    def __init__(self, db: Database, *, calendar: BillingCalendar | None = None, request_deadline_s: float = 3600.0) -> None:
        self._db = db
        self._calendar = calendar or BillingCalendar()
        self._running_max = timedelta(seconds=request_deadline_s) + SETTLING

    async def read(self, owner: Owner, currency: str, at: Moment) -> PeriodSums:
        """Return the sums of settled events of `owner`. A request belongs to the time of its admission."""
        async with self._db.reading() as connection:
            saved = await limit_levels.find(connection, owner)
            row = (await connection.execute(self._periods(owner, currency, at))).one()
            through_posting = await counters.last_taken(connection, counters.POSTING)
            longest = self._running_max
            levels = {kind: await _level(connection, owner, level, longest) for kind, level in saved.items()}
            known = len(levels) == len(BUCKET_KINDS)
            recent = [] if known else await _last_minute(connection, owner, at.now - RECENT, longest)
        return PeriodSums(
            tokens_today=int(row[0]),
            cost_month_picos=join_sum(row[1], row[2]),
            through_posting=through_posting,
            recent=tuple(recent),
            levels=levels,
        )

    async def outputs(self, key_id: str, model: str, before: datetime) -> Sequence[int]:
        """Return the output tokens of the last requests of a key with a model, admitted `before`, at most OUTPUTS_KEPT, oldest
        first.

        Of a request with several answers all of them count as one: how many there were is not in the ledger.
        """
        async with self._db.reading() as connection:
            found = (await connection.execute(outputs_query(key_id, model, before))).scalars().all()
        return [int(tokens) for tokens in reversed(found)]

    def _periods(self, owner: Owner, currency: str, at: Moment) -> Select[Any]:
        """Ask the sums by day: they are few, however many events the month has."""
        days = usage_rollups.c
        today, month = self._calendar.day_start(at.day), self._calendar.day_start(at.month)
        tokens = case((days.start_at >= today, days.prompt_tokens + days.completion_tokens), else_=0)
        cost = [case((days.currency == currency, half), else_=0) for half in (days.cost_high, days.cost_low)]
        query = select(*(func.coalesce(func.sum(each), 0) for each in (tokens, *cost)))
        return query.where(_of(owner, usage_rollups), days.bucket == DAY, days.start_at >= month)


def outputs_query(key_id: str, model: str, before: datetime) -> Select[Any]:
    """Ask for the output of the last requests of a key with a model that were admitted `before`, newest first.

    However long its history is, only the last OUTPUTS_READ_MAX events of the key are looked at, by the index on key and
    admission.
    """
    events = usage_events.c
    latest = select(events.model, events.kind, events.status, events.completion_tokens, events.admitted_at)
    latest = latest.where(events.key_id == key_id, events.admitted_at < before)
    last = latest.order_by(events.admitted_at.desc()).limit(OUTPUTS_READ_MAX).subquery().c
    query = select(last.completion_tokens).where(last.model == model, last.kind == "usage", last.status.in_(SETTLED))
    return query.where(last.completion_tokens > 0).order_by(last.admitted_at.desc()).limit(OUTPUTS_KEPT)


async def _last_minute(
    connection: AsyncConnection, owner: Owner, moment: datetime, longest: timedelta
) -> list[tuple[datetime, int]]:
    rows = (await connection.execute(_since(owner, moment, longest))).all()
    return sorted((admitted_at, tokens) for admitted_at, _settled_at, tokens, _reserved in rows if admitted_at >= moment)


async def _level(connection: AsyncConnection, owner: Owner, saved: SavedLevel, longest: timedelta) -> LevelNow:
    """Return a saved level with what it does not know of yet.

    What was admitted since counts whole. What ran when it was saved stands in it as reserved: if it took more, the rest counts;
    if it took less, the difference is not given back, because it may have been given back before the level was saved.
    """
    rows = (await connection.execute(_since(owner, saved.saved_at, longest))).all()
    charges = [
        (admitted_at, tokens) if admitted_at >= saved.saved_at else (settled_at, max(tokens - reserved, 0))
        for admitted_at, settled_at, tokens, reserved in rows
    ]
    return LevelNow(capacity=saved.capacity, units=saved.units, saved_at=saved.saved_at, since=tuple(sorted(charges)))


def _since(owner: Owner, moment: datetime, longest: timedelta) -> Select[Any]:
    """Return what was admitted at or after `moment`, and what ran then: (admitted_at, settled_at, tokens, reserved).

    No request runs for `longest`.
    """
    events = usage_events.c
    touched = or_(events.admitted_at >= moment, and_(events.admitted_at >= moment - longest, events.settled_at >= moment))
    return (
        select(events.admitted_at, events.settled_at, events.prompt_tokens + events.completion_tokens, events.reserved_tokens)
        .where(_of(owner, usage_events), touched, events.kind == "usage", events.status.in_(SETTLED))
        .order_by(events.admitted_at.desc())
        .limit(RECENT_EVENTS_MAX)
    )


def _of(owner: Owner, table: Table) -> ColumnElement[bool]:
    """Return the condition on rows of `owner`."""
    columns = table.c
    whose = {"tenant": columns.tenant_id == owner.id, "key": columns.key_id == owner.id, "model": columns.model == owner.model}
    if owner.scope == "model" or owner.model is None:
        return whose[owner.scope]
    return and_(whose[owner.scope], whose["model"])
