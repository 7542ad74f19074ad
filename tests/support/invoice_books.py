"""Prices, events and invoices of one tenant, for tests of invoices."""

from __future__ import annotations

from datetime import date

from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.db import Database
from appliance.metering.calendar import BillingCalendar
from appliance.metering.invoicing.free_allowances import FreeAllowances
from appliance.metering.invoicing.lines import EventSums
from appliance.metering.invoicing.rows import Invoice
from appliance.metering.invoicing.sums import Coverage, read_event_sums
from appliance.metering.prices import Price
from tests.support.billing import Tokens, post_event
from tests.support.cast import OWNER, Cast, Person
from tests.support.clock import FakeClock
from tests.support.ledgers import euro_invoices


class Books:
    """Bob's prices, events and invoices, with the clock at the 21st of November 2026."""

    def __init__(self, database: Database, clock: FakeClock, cast: Cast, price: Price) -> None:
        self.database, self.clock, self.cast, self.price = database, clock, cast, price
        self.invoices = euro_invoices(database, clock, BillingCalendar("UTC"))
        self.allowances = FreeAllowances(database, clock)
        self.bob = cast.bob

    async def post(self, day: date, tokens: Tokens | None = None, *, person: Person | None = None, **options: object) -> int:
        settled = {"price": self.price, **options}
        return await post_event(
            self.database, person or self.bob, day, tokens or Tokens(), epoch_id=self.cast.epoch_id, **settled  # type: ignore[arg-type]
        )  # fmt: skip

    async def draft(self, month: str, person: Person | None = None) -> Invoice:
        return await self.invoices.draft((person or self.bob).tenant.id, month, access=OWNER)

    async def close(self, month: str, person: Person | None = None) -> Invoice:
        return await self.invoices.close((await self.draft(month, person)).head.id, access=OWNER)

    async def sums(self, connection: AsyncConnection, after: int | None, through: int) -> list[EventSums]:
        """Return the sums of Bob's events until October with postings above `after` (None: all) and up to `through`."""
        previous = None if after is None else Coverage("2026-10", after)
        bob = self.bob.tenant.id
        return (await read_event_sums(connection, {bob: previous}, Coverage("2026-10", through)))[bob]
