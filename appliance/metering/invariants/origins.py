"""What an event must share with its request, its price and its day. Also checks the triggers that protect the ledger.

Judges one event at a time from what was read with it; knows neither sums nor invoices.
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
from appliance.metering.invariants.finding import NAMED_MAX, Finding, named

# Another price may begin, or be added, between the look-up of a request's price and its admission.
PRICE_SLACK = timedelta(minutes=1)
# A local date is never more than a day away from the UTC date. The zone in force when an event was admitted is not stored.
DAYS_APART_MAX = 1
KEPT_TABLES = ("audit_log", "free_allowances", "invoice_lines", "invoices", "prices", "usage_events")

_EVENTS = tables.usage_events
_REQUESTS = tables.requests
_KEEPING = {
    "sqlite": ("update", "delete", "insert_over", "update_over"),
    "postgresql": ("update", "delete", "truncate"),
}
_TRIGGERS = {
    "sqlite": "SELECT name FROM sqlite_master WHERE type = 'trigger'",
    "postgresql": "SELECT tgname FROM pg_trigger WHERE NOT tgisinternal AND tgenabled IN ('O', 'A')",
}


class PriceHistory:
    """All prices, to tell which one a request admitted at some moment should have."""

    def __init__(self, rows: list[Any]) -> None:
        self._wrong: list[str] = []
        self._doubtful: list[tuple[datetime, str]] = []
        self._books: dict[tuple[str, str], list[tuple[datetime, datetime, str]]] = defaultdict(list)
        for row in rows:
            self._books[row.model, row.currency].append((row.effective_from, row.created_at, row.id))
        for book in self._books.values():
            book.sort()

    @classmethod
    async def read(cls, connection: AsyncConnection) -> PriceHistory:
        """Return the prices as `connection` sees them."""
        prices = tables.prices.c
        query = select(prices.id, prices.model, prices.currency, prices.effective_from, prices.created_at)
        return cls(list((await connection.execute(query)).all()))

    def judge(self, row: Any) -> None:
        """Judge one event; events come in the order in which they were opened.

        An event must have the latest price of its model and currency that had begun, and a discount of that price. It may lack
        a price only if none was known at its admission (a model's first price may be added later and begin in the past). If
        the clock was set back, before and after cannot be told apart: events from before that get the benefit of the doubt.
        """
        if self._doubtful and row.admitted_at + PRICE_SLACK < self._doubtful[-1][0]:
            self._doubtful = [event for event in self._doubtful if event[0] <= row.admitted_at + PRICE_SLACK]
        if row.price_id is not None and not _is_own(row):
            self._wrong.append(row.request_id)
        elif not self._latest(row, after=row.price_from):
            self._doubtful.append((row.admitted_at, row.request_id))

    def wrong(self) -> list[str]:
        """Return the requests of events with a price that is not theirs."""
        return [*self._wrong, *(request_id for _, request_id in self._doubtful)]

    def _latest(self, row: Any, *, after: datetime | None) -> bool:
        """Return whether no price that begins later than `after` was in force and known at the request's admission."""
        if after is not None and after > row.admitted_at:
            return False
        if row.price_id is not None and row.price_model != row.model:
            return True  # renamed by a downgrade: no later price has this name
        book = self._books.get((row.model, row.currency), [])
        known_at = row.admitted_at - PRICE_SLACK
        end = bisect_right(book, known_at, key=lambda price: price[0])
        return not any(created_at <= known_at and (after is None or begins > after) for begins, created_at, _ in book[:end])


def _is_own(row: Any) -> bool:
    if (row.price_model, row.price_currency) != (row.model, row.currency):
        return bool(row.price_model == f"{row.model[:150]} ({row.currency} {row.price_id})")  # renamed by a downgrade
    return int(row.price_basis_points) in _shares(row)


def _shares(row: Any) -> set[int]:
    """Return the shares of its price that a request may pay: one per tier, for batch work times the batch share."""
    tiers = {PERCENT_MAX, *(row.price_tiers or {}).values()}
    batch = row.price_batch if row.batch else PERCENT_MAX
    return {tier * batch for tier in tiers}


def agrees_with_request(row: Any) -> bool:
    """Return whether an event and its request's row agree on tenant, key, model, batch work and end."""
    if row.request_row is None:
        return True
    if (row.tenant_id, row.key_id, row.model) != (row.request_tenant, row.request_key, row.request_model):
        return False
    if row.kind == "usage" and row.batch != row.request_batch:
        return False  # a correction is compared with the event that it corrects
    return bool(row.kind != "usage" or row.status == "pending" or row.finish_reason == row.request_finish)


def counts_agree_with_request(row: Any) -> bool:
    """Return whether the request's row has the tokens of its settled event. It keeps the whole prompt, charged or not."""
    if (row.cached_tokens, row.completion_tokens) != (row.request_cached, row.request_completion):
        return False
    if row.status == "posted":
        return bool(row.prompt_tokens == row.request_prompt)
    return bool(row.prompt_tokens <= row.request_prompt)


def is_on_its_day(row: Any) -> bool:
    """Return whether an event's billing day is a possible local date of its admission in some time zone."""
    day: date = row.billing_day
    return bool(abs(day - row.admitted_at.date()) <= timedelta(days=DAYS_APART_MAX))


async def requests_without_event(connection: AsyncConnection) -> list[str]:
    """Return some requests that have a row and no event."""
    joined = _REQUESTS.outerjoin(_EVENTS, (_EVENTS.c.request_id == _REQUESTS.c.id) & (_EVENTS.c.kind == "usage"))
    query = select(_REQUESTS.c.id).select_from(joined).where(_EVENTS.c.id.is_(None)).limit(NAMED_MAX + 1)
    return list((await connection.execute(query)).scalars().all())


async def kept_rows(connection: AsyncConnection, kind: str) -> Finding:
    """Return the finding on triggers that are missing or switched off."""
    there = set((await connection.execute(text(_TRIGGERS[kind]))).scalars().all())
    wanted = [f"{table}_no_{event}" for table in KEPT_TABLES for event in _KEEPING[kind]]
    missing = [name for name in wanted if name not in there]
    if missing:
        return Finding("kept", "broken", named(missing, "triggers that keep rows are missing or off"))
    return Finding("kept", "holds", "what was written for good is kept by the database")
