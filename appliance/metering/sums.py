"""What a tenant or key has used today and this month, read once from the ledger; admission keeps count from there."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol

from sqlalchemy import ColumnElement, case, func, select

from appliance.base.db import Database
from appliance.base.tables import usage_events
from appliance.metering.quotas import LimitScope

SPLIT = 10**9
SETTLED = ("posted", "recovered")


RECENT = timedelta(minutes=1)
"""After this long a bucket is full again, whatever was taken from it."""
RECENT_EVENTS_MAX = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodSums:
    """Tokens since midnight, cost since the first of the month (UTC), and (admitted_at, tokens) of the last minute."""

    tokens_today: int
    cost_month_picos: int
    recent: tuple[tuple[datetime, int], ...] = ()


class SumsReader(Protocol):
    """Where admission gets the sums from when it meets a tenant or key for the first time."""

    async def read(self, scope: LimitScope, owner_id: str, now: datetime) -> PeriodSums:
        """Return the sums of settled events of the tenant or key `owner_id`."""
        ...


class LedgerSums:
    """Reads the sums from the usage events. Costs in another currency than `currency`, from before it was set, do not count."""

    def __init__(self, db: Database, *, currency: str = "EUR") -> None:
        self._db = db
        self._currency = currency

    async def read(self, scope: LimitScope, owner_id: str, now: datetime) -> PeriodSums:
        """Return the sums of settled events of the tenant or key `owner_id`. A request belongs to the time of its admission."""
        events = usage_events.c
        owner = events.tenant_id if scope == "tenant" else events.key_id
        tokens = case((events.admitted_at >= day_start(now), events.prompt_tokens + events.completion_tokens), else_=0)
        high, low = split_sum(case((events.currency == self._currency, events.cost_picos), else_=0))
        query = select(func.coalesce(func.sum(tokens), 0), high, low).where(
            owner == owner_id, events.admitted_at >= month_start(now), events.status.in_(SETTLED)
        )
        last_minute = (
            select(events.admitted_at, events.prompt_tokens + events.completion_tokens)
            .where(owner == owner_id, events.admitted_at > now - RECENT, events.kind == "usage", events.status.in_(SETTLED))
            .order_by(events.admitted_at.desc())
            .limit(RECENT_EVENTS_MAX)
        )
        async with self._db.reading() as connection:
            row = (await connection.execute(query)).one()
            recent = (await connection.execute(last_minute)).all()
        return PeriodSums(
            tokens_today=int(row[0]),
            cost_month_picos=join_sum(row[1], row[2]),
            recent=tuple((moment, tokens) for moment, tokens in reversed(recent)),
        )


def split_sum(column: ColumnElement[int]) -> tuple[ColumnElement[int], ColumnElement[int]]:
    """Return the sums of the two halves of `column`: SQLite's own SUM fails beyond 64 bits, these do not."""
    return func.coalesce(func.sum(column // SPLIT), 0), func.coalesce(func.sum(column % SPLIT), 0)


def join_sum(high: int, low: int) -> int:
    """Return the exact sum from its two halves."""
    return int(high) * SPLIT + int(low)


def day_start(now: datetime) -> datetime:
    """Return the last midnight in UTC."""
    return now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


def next_day_start(now: datetime) -> datetime:
    """Return the coming midnight in UTC."""
    return day_start(now) + timedelta(days=1)


def month_start(now: datetime) -> datetime:
    """Return the beginning of the month in UTC."""
    return day_start(now).replace(day=1)
