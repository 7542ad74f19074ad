"""Settled usage events for tests of invoices, written as the ledger writes them, without the requests behind them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, time

from sqlalchemy import func, insert, select

from appliance.base.counters import POSTING, take
from appliance.base.db import Database
from appliance.base.ids import new_id
from appliance.base.money import discounted
from appliance.base.tables import prices, usage_events
from appliance.metering.prices import Price
from tests.support import factories
from tests.support.cast import Person


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The token counts of one event; `cached` is part of `prompt`."""

    prompt: int = 10
    cached: int = 0
    completion: int = 5
    rejected: int = 0

    def cost(self, price: Price | None, basis_points: int = 10_000) -> int:
        """Return the exact cost in pico-units at `basis_points` of the price."""
        if price is None:
            return 0
        prompt, cached, completion, rejected = (
            discounted(unit, basis_points)
            for unit in (price.prompt, price.cached_prompt, price.completion, price.rejected_draft)
        )
        computed = (self.prompt - self.cached) * prompt + self.cached * cached
        return computed + self.completion * completion + self.rejected * rejected


async def add_price(database: Database, *, prompt: int = 1_000_000) -> Price:
    """Add a price to the price book, in effect since 2020, and return it."""
    made = factories.price(prompt)
    columns = {name: getattr(made, name) for name in ("id", "effective_from", "currency", "prompt", "cached_prompt")}
    columns |= {"model": "demo", "completion": made.completion, "batch_percent": 50, "created_at": made.created_at}
    columns["effective_from"] = datetime(2020, 1, 1, tzinfo=UTC).replace(microsecond=int(made.id[-4:], 36) % 1_000_000)
    async with database.writing() as connection:
        await connection.execute(insert(prices).values(**columns, rejected_draft=made.rejected_draft))
    return made


async def post_event(
    database: Database,
    person: Person,
    day: date,
    tokens: Tokens,
    *,
    epoch_id: str,
    price: Price | None,
    model: str = "demo",
    basis_points: int = 10_000,
    batch: bool = False,
    is_correction: bool = False,
    currency: str = "EUR",
    note: str | None = None,
) -> int:
    """Write a settled event of `day` and return its cost. A correction corrects the tenant's first event."""
    cost = tokens.cost(price, basis_points)
    noon = datetime.combine(day, time(12), tzinfo=UTC)
    async with database.writing() as connection:
        posting = await take(connection, POSTING)
        first = select(func.min(usage_events.c.id)).where(usage_events.c.tenant_id == person.tenant.id)
        corrected = (await connection.execute(first)).scalar_one()
        await connection.execute(
            insert(usage_events).values(
                request_id=new_id("req"),
                tenant_id=person.tenant.id,
                key_id=person.key.id,
                epoch_id=epoch_id,
                model=model,
                endpoint="/v1/chat/completions",
                kind="adjustment" if is_correction else "usage",
                status="posted",
                finish_reason="stop",
                reserved_tokens=0,
                prompt_tokens=tokens.prompt,
                cached_tokens=tokens.cached,
                completion_tokens=tokens.completion,
                rejected_tokens=tokens.rejected,
                estimated=False,
                batch=batch,
                price_id=None if price is None else price.id,
                price_basis_points=basis_points,
                cost_picos=cost,
                currency=currency,
                billing_day=day,
                posting=posting,
                corrects_id=corrected if is_correction else None,
                note=note,
                admitted_at=noon,
                settled_at=noon,
            )
        )
    return cost
