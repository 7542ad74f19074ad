"""Checks that an event agrees with its request, its price and its day, and that the ledger's triggers are in place.

Checks one event at a time, from the row joined with its price and request; knows neither sums nor invoices.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from datetime import date, datetime, timedelta
from typing import Any

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base import tables
from appliance.base.money import PERCENT_MAX
from appliance.metering.invariants.finding import LISTED_MAX, Finding, list_ids

# A price may begin or be added between the look-up of a request's price and its admission.
PRICE_SLACK = timedelta(minutes=1)
# A local date is never more than a day away from the UTC date. The zone in force when an event was admitted is not stored.
DAYS_APART_MAX = 1
PROTECTED_TABLES = ("audit_log", "free_allowances", "invoice_lines", "invoices", "prices", "usage_events")

_EVENTS = tables.usage_events
_REQUESTS = tables.requests
_PROTECTED_EVENTS = {
    "sqlite": ("update", "delete", "insert_over", "update_over"),
    "postgresql": ("update", "delete", "truncate"),
}
_TRIGGERS = {
    "sqlite": "SELECT name FROM sqlite_master WHERE type = 'trigger'",
    "postgresql": "SELECT tgname FROM pg_trigger WHERE NOT tgisinternal AND tgenabled IN ('O', 'A')",
}


class PriceHistory:
    """All prices, to check that each event has the price in force at its admission. Collects violations."""

    def __init__(self, rows: list[Any]) -> None:
        self._violations: list[str] = []
        self._suspects: list[tuple[datetime, str]] = []
        self._prices: dict[tuple[str, str], list[tuple[datetime, datetime, str]]] = defaultdict(list)
        for row in rows:
            self._prices[row.model, row.currency].append((row.effective_from, row.created_at, row.id))
        for prices in self._prices.values():
            prices.sort()

    @classmethod
    async def read(cls, connection: AsyncConnection) -> PriceHistory:
        """Read all prices in the transaction of `connection`."""
        prices = tables.prices.c
        query = select(prices.id, prices.model, prices.currency, prices.effective_from, prices.created_at)
        return cls(list((await connection.execute(query)).all()))

    def check(self, row: Any) -> None:
        """Check one event. Call it in the order in which the events were opened.

        An event must have the latest price of its model and currency that had begun, and one of that price's discounts. It may
        have no price only if none was known at its admission (a model's first price may be added later and begin in the past).
        If the clock was set back, earlier and later cannot be distinguished: suspects admitted after the new time are dropped.
        """
        if self._suspects and row.admitted_at + PRICE_SLACK < self._suspects[-1][0]:
            self._suspects = [suspect for suspect in self._suspects if suspect[0] <= row.admitted_at + PRICE_SLACK]
        if row.price_id is not None and not _price_matches(row):
            self._violations.append(row.request_id)
        elif not self._is_latest(row, after=row.price_effective_from):
            self._suspects.append((row.admitted_at, row.request_id))

    def violations(self) -> list[str]:
        """Return the requests of events with a wrong price."""
        return [*self._violations, *(request_id for _, request_id in self._suspects)]

    def _is_latest(self, row: Any, *, after: datetime | None) -> bool:
        """Return whether no price that begins later than `after` was in force and known at the request's admission."""
        if after is not None and after > row.admitted_at:
            return False
        if row.price_id is not None and row.price_model != row.model:
            return True  # renamed by a downgrade: no later price has this name
        prices = self._prices.get((row.model, row.currency), [])
        known_at = row.admitted_at - PRICE_SLACK
        end = bisect_right(prices, known_at, key=lambda price: price[0])
        return not any(created_at <= known_at and (after is None or begins > after) for begins, created_at, _ in prices[:end])


def _price_matches(row: Any) -> bool:
    if (row.price_model, row.price_currency) != (row.model, row.currency):
        return bool(row.price_model == f"{row.model[:150]} ({row.currency} {row.price_id})")  # renamed by a downgrade
    return int(row.price_basis_points) in _allowed_basis_points(row)


def _allowed_basis_points(row: Any) -> set[int]:
    """Return the basis points of its price that an event may be charged: one per tier, times the batch share for batch work."""
    tiers = {PERCENT_MAX, *(row.price_tier_percents or {}).values()}
    batch = row.price_batch_percent if row.batch else PERCENT_MAX
    return {tier * batch for tier in tiers}


def agrees_with_request(row: Any) -> bool:
    """Return whether an event and its request's row agree on tenant, key, model, batch work and finish reason."""
    if row.request_row is None:
        return True
    if (row.tenant_id, row.key_id, row.model) != (row.request_tenant, row.request_key, row.request_model):
        return False
    if row.kind == "usage" and row.batch != row.request_batch:
        return False  # a correction is compared with the event that it corrects
    return bool(row.kind != "usage" or row.status == "pending" or row.finish_reason == row.request_finish)


def counts_agree_with_request(row: Any) -> bool:
    """Return whether the request's row has the counts of its settled event; it has the whole prompt even if not charged."""
    if (row.cached_tokens, row.completion_tokens) != (row.request_cached, row.request_completion):
        return False
    if row.status == "posted":
        return bool(row.prompt_tokens == row.request_prompt)
    return bool(row.prompt_tokens <= row.request_prompt)


def is_on_its_day(row: Any) -> bool:
    """Return whether an event's billing day is the local date of its admission in some time zone."""
    day: date = row.billing_day
    return bool(abs(day - row.admitted_at.date()) <= timedelta(days=DAYS_APART_MAX))


async def requests_without_event(connection: AsyncConnection) -> list[str]:
    """Return up to LISTED_MAX + 1 requests that have a row but no event."""
    joined = _REQUESTS.outerjoin(_EVENTS, (_EVENTS.c.request_id == _REQUESTS.c.id) & (_EVENTS.c.kind == "usage"))
    query = select(_REQUESTS.c.id).select_from(joined).where(_EVENTS.c.id.is_(None)).limit(LISTED_MAX + 1)
    return list((await connection.execute(query)).scalars().all())


async def check_triggers(connection: AsyncConnection, kind: str) -> Finding:
    """Check that no protecting trigger is missing or disabled."""
    enabled = set((await connection.execute(text(_TRIGGERS[kind]))).scalars().all())
    expected = [f"{table}_no_{event}" for table in PROTECTED_TABLES for event in _PROTECTED_EVENTS[kind]]
    missing = [name for name in expected if name not in enabled]
    if missing:
        return Finding("kept", "broken", list_ids(missing, "protecting triggers that are missing or disabled"))
    return Finding("kept", "holds", "the database protects rows that must not change")
