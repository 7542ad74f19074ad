"""The price book: what tokens of a model cost, from when on. A price never changes: a later one replaces it, and it can be
withdrawn until it begins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import RowMapping, delete, insert, select
from sqlalchemy.exc import IntegrityError

from appliance.base.clock import Clock, rfc3339
from appliance.base.db import Database
from appliance.base.errors import InvalidValue, NotFound, PriceBegun
from appliance.base.ids import new_id
from appliance.base.money import PERCENT_MAX, PRICE_MICROS_MAX, discounted
from appliance.base.shared_reads import SharedReads
from appliance.base.tables import prices
from appliance.tenancy.audit import record, recorded_fields
from appliance.tenancy.fields import TIERS, check_choice, check_currency, check_name, check_whole
from appliance.tenancy.pages import PAGE_ROWS_DEFAULT, Page, read_page

PAST_TOLERANCE = timedelta(minutes=1)  # a client's clock may be slightly behind
WITHDRAWAL_END = timedelta(minutes=1)  # a price is final this long before it begins: requests may have looked it up already


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Unit prices after discounts, for one request. `basis_points` is the share of the full price that is charged."""

    prompt: int
    cached_prompt: int
    completion: int
    rejected_draft: int
    basis_points: int

    def cost_picos(self, *, prompt_tokens: int, cached_tokens: int, completion_tokens: int, rejected_tokens: int = 0) -> int:
        """Return the exact cost in pico-units. `cached_tokens` are the part of `prompt_tokens` reused from the cache.

        Corrections have signed counts, and so a signed cost.
        """
        prompt = (prompt_tokens - cached_tokens) * self.prompt + cached_tokens * self.cached_prompt
        return prompt + completion_tokens * self.completion + rejected_tokens * self.rejected_draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Micro-units of `currency` per million tokens, for requests admitted from `effective_from` on."""

    id: str
    model: str
    effective_from: datetime
    currency: str
    prompt: int
    cached_prompt: int
    completion: int
    batch_percent: int
    created_at: datetime
    rejected_draft: int = 0
    tier_percents: Mapping[str, int] | None = None

    def rate(self, tier: str, *, batch: bool = False) -> Rate:
        """Return the unit prices that a tenant of `tier` pays, for batch work or not."""
        tier_percent = (self.tier_percents or {}).get(tier, PERCENT_MAX)
        return self.rate_at(tier_percent * (self.batch_percent if batch else PERCENT_MAX))

    def rate_at(self, basis_points: int) -> Rate:
        """Return the unit prices at `basis_points` ten-thousandths of the full price, the share stored with an event."""
        return Rate(
            prompt=discounted(self.prompt, basis_points),
            cached_prompt=discounted(self.cached_prompt, basis_points),
            completion=discounted(self.completion, basis_points),
            rejected_draft=discounted(self.rejected_draft, basis_points),
            basis_points=basis_points,
        )


class PriceBook:
    """All prices, cached by model. `add` and `withdraw` invalidate the cache of their model, `clear_cache` all of it.

    Each currency has prices of its own: amounts are never converted. `currency` is for tenants without one of their own.
    """

    def __init__(self, db: Database, clock: Clock, *, currency: str) -> None:
        self._db = db
        self._clock = clock
        self._currency = currency
        self._by_model: dict[str, Sequence[Price]] = {}
        self._reads: SharedReads[tuple[str, int], Sequence[Price]] = SharedReads()
        self._changes = 0

    async def add(
        self,
        *,
        model: str,
        currency: str,
        prompt: int,
        cached_prompt: int,
        completion: int,
        rejected_draft: int = 0,
        effective_from: datetime | None = None,
        batch_percent: int = PERCENT_MAX,
        tier_percents: Mapping[str, int] | None = None,
    ) -> Price:
        """Add and return a price, in force from `effective_from` (None: now) until the next of its model and currency begins.

        Only the first price of a model in a currency may begin in the past. Raises InvalidValue.
        """
        now = self._clock.now()
        price = Price(
            id=new_id("price"),
            model=check_name(model, "model"),
            effective_from=_normalise_start(effective_from or now),
            currency=check_currency(currency),
            prompt=check_whole(prompt, "prompt", 0, PRICE_MICROS_MAX),
            cached_prompt=check_whole(cached_prompt, "cached_prompt", 0, PRICE_MICROS_MAX),
            completion=check_whole(completion, "completion", 0, PRICE_MICROS_MAX),
            rejected_draft=check_whole(rejected_draft, "rejected_draft", 0, PRICE_MICROS_MAX),
            batch_percent=check_whole(batch_percent, "batch_percent", 0, PERCENT_MAX),
            tier_percents=_check_tiers(tier_percents),
            created_at=now,
        )
        await self._insert(price, earliest=now - PAST_TOLERANCE)
        self._drop_cached(price.model)
        return price

    async def withdraw(self, price_id: str) -> Price:
        """Remove a price that has not begun, and return it. Raises NotFound and PriceBegun."""
        now = self._clock.now()
        try:
            async with self._db.writing() as connection:
                row = (await connection.execute(select(prices).where(prices.c.id == price_id))).mappings().first()
                if row is None:
                    raise NotFound("no such price", param="price_id")
                price = price_from_row(row)
                _check_can_withdraw(price, now)
                await connection.execute(delete(prices).where(prices.c.id == price_id))
                await record(connection, self._clock, "price.withdraw", "price", price_id, before=recorded_fields(price))
        except IntegrityError as error:  # a trigger protects it: by the database's clock the price has begun
            raise PriceBegun(
                "by the database's clock the price has already taken effect; it cannot be withdrawn", param="price_id"
            ) from error
        self._drop_cached(price.model)
        return price

    def clear_cache(self) -> None:
        """Clear the cache: another process may have added or withdrawn prices."""
        self._changes += 1
        self._by_model.clear()

    def _drop_cached(self, model: str) -> None:
        self._changes += 1
        self._by_model.pop(model, None)

    async def list(self, limit: int = PAGE_ROWS_DEFAULT, cursor: str | None = None) -> Page[Price]:
        """Return prices in the order of creation."""
        return await read_page(self._db, "prices", select(prices), prices.c.id, limit, cursor, price_from_row)

    async def current(self, model: str, at: datetime, *, currency: str | None = None) -> Price | None:
        """Return the price of `model` in `currency` (None: the appliance's) that is in force at `at`, or None."""
        cached = self._by_model.get(model)
        if cached is None:
            cached = await self._reads.get((model, self._changes), partial(self._read, model))
        currency = currency or self._currency
        in_force = [price for price in cached if price.effective_from <= at and price.currency == currency]
        return in_force[-1] if in_force else None

    async def unpriced(self, pairs: Iterable[tuple[str, str]], at: datetime) -> Sequence[tuple[str, str]]:
        """Return, sorted, the pairs of model and currency without a price at `at`."""
        missing = []
        for model, currency in sorted(set(pairs)):
            if await self.current(model, at, currency=currency) is None:
                missing.append((model, currency))
        return missing

    async def _read(self, model: str) -> Sequence[Price]:
        changes = self._changes
        query = select(prices).where(prices.c.model == model).order_by(prices.c.effective_from)
        async with self._db.reading() as connection:
            rows = (await connection.execute(query)).mappings().all()
        found = [price_from_row(row) for row in rows]
        if changes == self._changes:  # otherwise prices have changed meanwhile: do not cache
            self._by_model[model] = found
        return found

    async def _insert(self, price: Price, earliest: datetime) -> None:
        same = (prices.c.model == price.model, prices.c.currency == price.currency)
        try:
            async with self._db.writing() as connection:
                query = select(prices.c.id, prices.c.effective_from).where(*same)
                others = (await connection.execute(query)).all()
                _check_start(price, {effective_from: price_id for price_id, effective_from in others}, earliest)
                await connection.execute(insert(prices).values(**_columns(price)))
                await record(connection, self._clock, "price.create", "price", price.id, after=recorded_fields(price))
        except IntegrityError as error:  # added concurrently, after our check
            raise _start_conflict(price, "another price") from error


def price_from_row(row: RowMapping) -> Price:
    """Convert a row of `prices`."""
    return Price(**{column: row[column] for column in _COLUMNS})


def _columns(price: Price) -> dict[str, Any]:
    return {column: getattr(price, column) for column in _COLUMNS}


_COLUMNS = tuple(column.name for column in prices.columns)


def _check_start(price: Price, others: Mapping[datetime, str], earliest: datetime) -> None:
    """Raise InvalidValue if the price begins at the same time as another, or in the past although there are others."""
    if price.effective_from in others:
        raise _start_conflict(price, others[price.effective_from])
    if others and price.effective_from < earliest:
        raise InvalidValue(
            f"{price.model} already has a price in {price.currency}; a new one cannot begin in the past", param="effective_from"
        )


def _check_can_withdraw(price: Price, now: datetime) -> None:
    if price.effective_from <= now + WITHDRAWAL_END:
        raise PriceBegun(
            f"the price of {price.model} from {rfc3339(price.effective_from)} can no longer be withdrawn: that is possible "
            "until a minute before it begins. Add a new price to replace it",
            param="price_id",
        )


def _start_conflict(price: Price, other: str) -> InvalidValue:
    moment = rfc3339(price.effective_from)
    return InvalidValue(
        f"{price.model} already has a price in {price.currency} from {moment} ({other}): two cannot be in force at once",
        param="effective_from",
    )


def _check_tiers(tier_percents: Mapping[str, int] | None) -> dict[str, int] | None:
    if tier_percents is None:
        return None
    if not isinstance(tier_percents, Mapping):
        raise InvalidValue("tier_percents must be an object of tiers and percentages", param="tier_percents")
    for tier in tier_percents:
        check_choice(tier, "tier_percents", TIERS)
    return {tier: check_whole(percent, f"tier_percents.{tier}", 0, PERCENT_MAX) for tier, percent in tier_percents.items()}


def _normalise_start(effective_from: datetime) -> datetime:
    if effective_from.tzinfo is None:
        raise InvalidValue("effective_from must include a UTC offset, e.g. 2026-01-31T12:00:00Z", param="effective_from")
    return effective_from.replace(microsecond=effective_from.microsecond // 1000 * 1000)  # the precision of our timestamps
