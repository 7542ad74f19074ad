"""Reads from the ledger what owners of limits have used, and how long a key's recent answers were. Decides nothing."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Row, Select, and_, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base import counters
from appliance.base.batches import batched
from appliance.base.db import Database
from appliance.base.tables import usage_events
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.records import BILLED
from appliance.metering.ledger.rollups import join_sum
from appliance.metering.ledger.rows import is_kind
from appliance.metering.limits import saved_levels
from appliance.metering.limits.decisions import BUCKET_KINDS, LimitKind
from appliance.metering.limits.output_estimates import OUTPUTS_KEPT
from appliance.metering.limits.owner_sums import IN_LIST_MAX, days_of_month, rows_by_owner, sums_query
from appliance.metering.limits.owners import Owner, owners_of
from appliance.metering.limits.sums import RECENT, PeriodSums, SavedLevel
from appliance.metering.limits.windows import Moment

RECENT_EVENTS_MAX = 20_000
OUTPUTS_READ_MAX = 3 * OUTPUTS_KEPT
SETTLING = timedelta(hours=1)  # a request that reached its deadline is settled well within this time


class LedgerSums:
    """Reads daily sums, recent usage events and saved levels. Costs in other currencies are reported separately."""

    def __init__(self, db: Database, *, calendar: BillingCalendar, request_deadline_s: float) -> None:
        self._db = db
        self._calendar = calendar
        self._running_max = timedelta(seconds=request_deadline_s) + SETTLING

    async def read(
        self, currencies: Mapping[Owner, str], at: Moment, ended: Callable[[], Collection[str]] = tuple
    ) -> Mapping[Owner, PeriodSums]:
        """Return the sums of billed events of each owner; the number of statements does not depend on the number of owners.

        A request counts at the time of its admission.
        """
        async with self._db.reading() as connection:
            saved = await saved_levels.read_levels(connection, currencies)
            days, today = days_of_month(self._calendar, at.month), self._calendar.day_start(at.day)
            sums = (await connection.execute(sums_query(currencies, days, tokens_since=today))).all()
            through_posting = await counters.last_taken(connection, counters.POSTING)
            events = await _events(connection, {owner: self._needed(saved[owner], at) for owner in currencies})
            included = await _billed(connection, [*ended()])
        tokens: Counter[Owner] = Counter()
        costs: dict[Owner, Counter[str]] = {owner: Counter() for owner in currencies}
        for owner, row in rows_by_owner(sums, currencies):
            tokens[owner] += int(row.tokens)
            costs[owner][row.currency] += join_sum(row.high, row.low)
        return {
            owner: PeriodSums(
                tokens_today=tokens[owner],
                cost_month_picos=costs[owner].pop(currency, 0),
                through_posting=through_posting,
                included=included,
                recent=() if _all_saved(saved[owner]) else _last_minute(events[owner], at),
                levels={kind: _level(kind, level, events[owner]) for kind, level in saved[owner].items()},
                other_costs_picos=costs[owner],
            )
            for owner, currency in currencies.items()
        }

    async def outputs(self, key_id: str, model: str, before: datetime) -> Sequence[int]:
        """Return the output tokens of the last requests of a key with a model, admitted `before`, at most OUTPUTS_KEPT, oldest
        first.

        The answers of one request count as a single one: the ledger does not record how many there were.
        """
        async with self._db.reading() as connection:
            found = (await connection.execute(outputs_query(key_id, model, before))).scalars().all()
        return [int(tokens) for tokens in reversed(found)]

    def _needed(self, saved: Mapping[LimitKind, SavedLevel], at: Moment) -> Span:
        """Return the span of events after the saved levels, and of the last minute if a level was never saved."""
        moments = [level.saved_at for level in saved.values()]
        admitted = [moment - self._running_max for moment in moments]
        if not _all_saved(saved):
            moments.append(at.now - RECENT)
            admitted.append(at.now - RECENT)
        return Span(min(moments), min(admitted))


class Span(NamedTuple):
    """Events that were admitted or settled at or after `moment`. All of them were admitted at or after `admitted`."""

    moment: datetime
    admitted: datetime


def outputs_query(key_id: str, model: str, before: datetime) -> Select[Any]:
    """Return the query for the output of the last requests of a key with a model, admitted `before`, newest first.

    Only the key's last OUTPUTS_READ_MAX events are read, by the index on key and admission, however long its history is.
    """
    events = usage_events.c
    latest = select(events.model, events.kind, events.status, events.completion_tokens, events.admitted_at)
    latest = latest.where(events.key_id == key_id, events.admitted_at < before)
    last = latest.order_by(events.admitted_at.desc()).limit(OUTPUTS_READ_MAX).subquery().c
    query = select(last.completion_tokens).where(last.model == model, last.kind == "usage", last.status.in_(BILLED))
    return query.where(last.completion_tokens > 0).order_by(last.admitted_at.desc()).limit(OUTPUTS_KEPT)


def _all_saved(saved: Mapping[LimitKind, SavedLevel]) -> bool:
    return len(saved) == len(BUCKET_KINDS)


def _last_minute(events: Sequence[Row[Any]], at: Moment) -> tuple[tuple[datetime, int], ...]:
    return tuple(sorted((event.admitted_at, event.tokens) for event in events if event.admitted_at >= at.now - RECENT))


def _level(kind: LimitKind, saved: SavedLevel, events: Sequence[Row[Any]]) -> SavedLevel:
    """Return a saved level with what was used since."""
    return dataclasses.replace(saved, since=tuple(sorted(_charges(kind, saved.saved_at, events))))


def _charges(kind: LimitKind, saved_at: datetime, events: Sequence[Row[Any]]) -> Iterator[tuple[datetime, int]]:
    """Yield the charges since a level was saved, at the times at which a live bucket would have been charged.

    A request admitted since is charged up to its reservation at its admission, and the rest at its settlement. A request that
    was running when the level was saved is in it with its reservation: usage beyond that is charged; unused reservation is not
    refunded, because it may have been refunded before the level was saved.
    """
    for event in events:
        if event.admitted_at >= saved_at:
            yield event.admitted_at, min(event.tokens, event.reserved_tokens) if kind == "tokens" else 1
        if event.settled_at >= saved_at and kind == "tokens" and event.tokens > event.reserved_tokens:
            yield event.settled_at, event.tokens - event.reserved_tokens


async def _billed(connection: AsyncConnection, requests: Sequence[str]) -> frozenset[str]:
    """Return which of these requests are billed."""
    found: set[str] = set()
    for batch in batched(requests, IN_LIST_MAX):
        found.update((await connection.execute(billed_query(batch))).scalars())
    return frozenset(found)


def billed_query(requests: Sequence[str]) -> Select[Any]:
    """Return the query for which of these requests are billed."""
    events = usage_events.c
    return select(events.request_id).where(is_kind("usage"), events.status.in_(BILLED), events.request_id.in_(requests))


async def _events(connection: AsyncConnection, spans: Mapping[Owner, Span]) -> dict[Owner, list[Row[Any]]]:
    """Return the billed requests of each owner in its span, of one owner at most the latest RECENT_EVENTS_MAX."""
    rows = (await connection.execute(events_query(spans))).all()
    if len(rows) == RECENT_EVENTS_MAX and len(spans) > 1:
        return {owner: (await _events(connection, {owner: span}))[owner] for owner, span in spans.items()}
    events: dict[Owner, list[Row[Any]]] = {owner: [] for owner in spans}
    for row in rows:
        for owner in owners_of(row.tenant_id, row.key_id, row.model):
            if owner in events:
                events[owner].append(row)
    return events


def events_query(spans: Mapping[Owner, Span]) -> Select[Any]:
    """Return the query for the billed requests of `spans` (not empty), at most RECENT_EVENTS_MAX; of one owner the latest."""
    events = usage_events.c
    conditions = [
        and_(
            _owned_by(owner),
            events.admitted_at >= span.admitted,  # implied by the next line, but lets an index on admission be used
            or_(events.admitted_at >= span.moment, events.settled_at >= span.moment),
        )
        for owner, span in spans.items()
    ]
    query = select(
        events.tenant_id,
        events.key_id,
        events.model,
        events.admitted_at,
        events.settled_at,
        (events.prompt_tokens + events.completion_tokens).label("tokens"),
        events.reserved_tokens,
    )
    query = query.where(or_(*conditions), events.kind == "usage", events.status.in_(BILLED)).limit(RECENT_EVENTS_MAX)
    return query.order_by(events.admitted_at.desc()) if len(spans) == 1 else query


def _owned_by(owner: Owner) -> ColumnElement[bool]:
    """Return the condition that an event belongs to `owner`."""
    events = usage_events.c
    if owner.scope == "model":
        return events.model == owner.model
    condition = (events.tenant_id if owner.scope == "tenant" else events.key_id) == owner.id
    return condition if owner.model is None else and_(condition, events.model == owner.model)
