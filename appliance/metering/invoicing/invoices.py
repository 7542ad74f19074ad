"""Draft, close, list and read the invoice of a tenant and month. Postings, never a clock, decide which events it bills.

                ┌── recomputed on every read
(nothing) ──► draft ──► closed: number, lines, totals, seller, buyer and coverage are stored and never change
                month over, earlier months closed; in one transaction that locks the posting counter
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from functools import partial

from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.batches import batched
from appliance.base.clock import Clock
from appliance.base.counters import POSTING, lock
from appliance.base.db import Database
from appliance.base.errors import GatehouseError, InvalidValue
from appliance.metering.calendar import BillingCalendar, first_day
from appliance.metering.invoicing import rows
from appliance.metering.invoicing.computation import InvoiceComputer, coverage_of
from appliance.metering.invoicing.portions import CLOSABLE, DRAFT_CONDITIONS, Expected, Outcome, Portions, check_draft
from appliance.metering.invoicing.rows import Invoice, InvoiceHead
from appliance.metering.invoicing.sums import read_covered_events
from appliance.metering.ledger.records import UsageEvent
from appliance.tenancy.access import Access
from appliance.tenancy.fields import check_choice
from appliance.tenancy.pages import PAGE_ROWS_DEFAULT, Page, check_limit, decode_cursor, page_of, read_every_page
from appliance.tenancy.roles import Action

PORTION_TENANTS = 20  # computed or stored together: longer portions make requests wait longer
FIRST_DAY = date(2000, 1, 1)  # no appliance has earlier usage, and later dates cause no calendar problems


class Invoices:
    """The invoices of all tenants."""

    def __init__(self, db: Database, clock: Clock, calendar: BillingCalendar, *, currency: str) -> None:
        self._db = db
        self._clock = clock
        self._calendar = calendar
        self._computer = InvoiceComputer(calendar, currency=currency)
        self._portions = Portions(db, clock, calendar, self._computer, currency=currency)

    async def draft(self, tenant_id: str, month: str, *, only: str | None = None, access: Access) -> Invoice:
        """Create, or return, the draft of a month (`YYYY-MM`) that has begun.

        `only` is one of DRAFT_CONDITIONS. `billable`: raises NothingToBill instead of creating an empty draft; `closable`: also
        raises MonthNotOver before the month is over, and EarlierMonthOpen if an earlier month has something to bill. Raises
        NotFound, RoleNotAllowed, InvalidValue, InvoiceClosed, DraftUncomputable, and MonthOutOfOrder when a later month is
        closed; on an error no draft is created.
        """
        return _raised((await self.draft_each([tenant_id], month, only=only, access=access))[tenant_id])

    async def draft_each(
        self, tenant_ids: Sequence[str], month: str, *, only: str | None = None, access: Access
    ) -> dict[str, Outcome]:
        """Do `draft` for each tenant, and return the invoice or its error by tenant id. Errors of access and month are raised.

        Each transaction stores a few drafts: after a crash those stored remain, and drafting again adds the others.
        """
        self.check_draft(tenant_ids, month, only, access)
        drafted: dict[str, Outcome] = {}
        for portion in batched(tenant_ids, PORTION_TENANTS):
            drafted |= await self._portions.draft(portion, month, only)
        return drafted

    def check_draft(self, tenant_ids: Sequence[str], month: str, only: str | None, access: Access) -> None:
        """Raise the errors of `draft_each` that concern no single tenant: RoleNotAllowed, InvalidValue, MonthNotOver."""
        for tenant_id in tenant_ids:
            access.require(Action.BILLING, tenant_id)
        if first_day(month) < FIRST_DAY:
            raise InvalidValue(f"month must be {FIRST_DAY:%Y-%m} or later", param="month")
        if self._calendar.day_start(first_day(month)) > self._clock.now():
            raise InvalidValue(f"{month} has not begun", param="month")
        if only is not None and check_choice(only, "only", DRAFT_CONDITIONS) == CLOSABLE:
            self._portions.check_month_over(month)

    async def head(self, invoice_id: str, *, access: Access, action: Action = Action.INVOICES) -> InvoiceHead:
        """Return an invoice without its lines. Raises RoleNotAllowed, and NotFound (also for another tenant's invoice)."""
        async with self._db.reading() as connection:
            return await _read_head(connection, invoice_id, access, action)

    async def get(self, invoice_id: str, *, access: Access, action: Action = Action.INVOICES) -> Invoice:
        """Return an invoice; a draft is computed now. Raises the errors of `head`, and DraftUncomputable."""
        async with self._db.reading() as connection:
            head = await _read_head(connection, invoice_id, access, action)
            if head.state == "draft":
                return (await self._computer.compute(connection, head)).invoice
            return (await self._load(connection, [head]))[0]

    async def list(
        self,
        limit: int = PAGE_ROWS_DEFAULT,
        cursor: str | None = None,
        *,
        month: str | None = None,
        state: str | None = None,
        access: Access,
    ) -> Page[InvoiceHead]:
        """Return the invoices of all tenants that `access` may see, without lines, newest month first."""
        async with self._db.reading() as connection:
            return await rows.read_page(connection, limit, cursor, access, month=month, state=state)

    async def drafts_of_month(self, month: str, *, access: Access) -> Sequence[Invoice]:
        """Return all drafts of a month that `access` may bill, computed a few at a time. One that cannot be computed has a
        `problem` instead of lines. Raises InvalidValue."""
        first_day(month)
        drafts: list[Invoice] = []
        heads = await read_every_page(partial(self.list, month=month, state="draft", access=access))
        tenant_ids = [head.tenant_id for head in heads if access.may(Action.BILLING, head.tenant_id)]
        for portion in batched(tenant_ids, PORTION_TENANTS):
            async with self._db.reading() as connection:
                found = (await rows.read_month(connection, portion, month)).values()
                still_drafts = [head for head in found if head.state == "draft"]
                drafts += await self._computer.try_compute(connection, month, still_drafts)
        return drafts

    async def list_for_tenant(
        self, tenant_id: str, limit: int = PAGE_ROWS_DEFAULT, cursor: str | None = None, *, access: Access
    ) -> Page[Invoice]:
        """Return the invoices of a tenant with their lines, newest month first. A draft that cannot be computed has a
        `problem` instead of lines."""
        access.require(Action.INVOICES, tenant_id)
        async with self._db.reading() as connection:
            page = await rows.read_page(connection, limit, cursor, access, tenant_id=tenant_id)
            loaded = await self._load(connection, page.data)
        return Page(data=[*loaded], next_cursor=page.next_cursor)

    async def close(
        self,
        invoice_id: str,
        *,
        expected_total_micros: int | None = None,
        expected_currency: str | None = None,
        access: Access,
    ) -> Invoice:
        """Close the invoice and return it: it gets a number and never changes again.

        Raises the errors of `head`, InvoiceClosed, MonthNotOver, MonthOutOfOrder (naming the month to close first),
        DraftUncomputable, InvalidValue, and TotalChanged if total or currency are not those expected (None: any); on an error
        nothing has changed and no number is used up.
        """
        expected = Expected(expected_total_micros, expected_currency)
        return _raised((await self.close_each({invoice_id: expected}, access=access))[invoice_id])

    async def close_each(self, expected: Mapping[str, Expected], *, access: Access) -> dict[str, Outcome]:
        """Do `close` for each invoice in `expected`, all of one month, and return the invoice or its error by id.

        They are numbered in this order. Each transaction closes a few: after a crash those closed remain, and closing the
        others continues with the next number.
        """
        closed: dict[str, Outcome] = {}
        for portion in batched(list(expected), PORTION_TENANTS):
            closed |= await self._portions.close({invoice_id: expected[invoice_id] for invoice_id in portion}, access)
        return closed

    async def events(
        self,
        invoice_id: str,
        limit: int = PAGE_ROWS_DEFAULT,
        cursor: str | None = None,
        *,
        kind: str | None = None,
        access: Access,
    ) -> Page[UsageEvent]:
        """Return the events that an invoice covers, of one `kind` or of both, in posting order. Raises NotFound."""
        after = 0 if cursor is None else decode_cursor("invoice_events", cursor, [int])[0]
        rows_max = check_limit(limit) + 1
        async with self._db.reading() as connection:
            head = await _read_head(connection, invoice_id, access, Action.INVOICES)
            covered = await coverage_of(connection, head)
            found = await read_covered_events(
                connection, head.tenant_id, *covered, kind=kind, after_posting=after, rows_max=rows_max
            )
        return page_of(found, limit, "invoice_events", lambda event: [event.posting or 0])

    async def discard(self, invoice_id: str, *, access: Access) -> None:
        """Delete a draft. Raises NotFound, and InvoiceClosed if the invoice is closed."""
        async with self._db.writing() as connection:
            await lock(connection, POSTING)
            head = await _read_head(connection, invoice_id, access, Action.BILLING)
            check_draft(head)
            await self._portions.discard(connection, [head])

    async def _load(self, connection: AsyncConnection, heads: Sequence[InvoiceHead]) -> Sequence[Invoice]:
        """Return the invoices of these heads: closed ones with their stored lines, drafts recomputed where possible."""
        lines = await rows.read_lines(connection, [head.id for head in heads if head.state == "closed"])
        return [
            (await self._computer.try_compute(connection, head.month, [head]))[0]
            if head.state == "draft"
            else rows.closed_invoice(head, lines[head.id])
            for head in heads
        ]


async def _read_head(connection: AsyncConnection, invoice_id: str, access: Access, action: Action) -> InvoiceHead:
    head = (await rows.read_heads(connection, [invoice_id])).get(invoice_id)
    return access.row(head, action, what="invoice", param="invoice_id")


def _raised(outcome: Outcome) -> Invoice:
    """Return the invoice, or raise the error."""
    if isinstance(outcome, GatehouseError):
        raise outcome
    return outcome
