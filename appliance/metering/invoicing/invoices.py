"""Draft, close, list and read the invoice of a tenant and month. Postings, never a clock, decide which events it bills.

                 ┌── recomputed on every read
 (nothing) ──► draft ──► closed: number, lines, totals, seller, buyer and coverage are stored and never change
                 month over, earlier months closed; in one transaction that locks the posting counter

While the counter is locked, no event can be posted: every posted event is visible to the closing transaction, and any event
posted later goes to a later invoice. The lock blocks all requests, so nearly everything is summed before taking it; only the
events posted in between are added under the lock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import date

from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.clock import Clock
from appliance.base.counters import POSTING, lock, take
from appliance.base.db import Database
from appliance.base.errors import (
    EarlierMonthOpen,
    InvalidValue,
    InvoiceClosed,
    MonthNotOver,
    MonthOutOfOrder,
    NotFound,
    NothingToBill,
    TotalChanged,
)
from appliance.base.ids import new_id
from appliance.base.money import format_micros
from appliance.metering.alerts import outbox
from appliance.metering.calendar import BillingCalendar, first_day
from appliance.metering.invoicing import rows
from appliance.metering.invoicing.computation import InvoiceComputer, complete_sums, coverage_of, read_sums_ahead
from appliance.metering.invoicing.rows import TOTAL_MICROS_MAX, Invoice, InvoiceHead
from appliance.metering.invoicing.sums import read_covered_events
from appliance.metering.ledger.records import UsageEvent
from appliance.tenancy import audit
from appliance.tenancy.access import Access
from appliance.tenancy.fields import check_choice, check_currency, check_whole
from appliance.tenancy.pages import PAGE_ROWS_DEFAULT, Page, check_limit, decode_cursor, page_of
from appliance.tenancy.roles import Action

BILLABLE, CLOSABLE = DRAFT_CONDITIONS = ("billable", "closable")
FIRST_DAY = date(2000, 1, 1)  # no appliance has earlier usage, and later dates cause no calendar problems


class Invoices:
    """The invoices of all tenants."""

    def __init__(self, db: Database, clock: Clock, calendar: BillingCalendar, *, currency: str) -> None:
        self._db = db
        self._clock = clock
        self._calendar = calendar
        self._currency = currency
        self._computer = InvoiceComputer(calendar, currency=currency)

    async def draft(self, tenant_id: str, month: str, *, only: str | None = None, access: Access) -> Invoice:
        """Create, or return, the draft of a month (`YYYY-MM`) that has begun.

        `only` is one of DRAFT_CONDITIONS. `billable`: raises NothingToBill instead of creating an empty draft; `closable`: also
        raises MonthNotOver before the month is over, and EarlierMonthOpen instead of NothingToBill if an earlier month has
        something to bill. Raises NotFound, RoleNotAllowed, InvalidValue, InvoiceClosed, DraftUncomputable, and MonthOutOfOrder
        when a later month is closed; on an error no draft is created.
        """
        access.require(Action.BILLING, tenant_id)
        if first_day(month) < FIRST_DAY:
            raise InvalidValue(f"month must be {FIRST_DAY:%Y-%m} or later", param="month")
        if self._calendar.day_start(first_day(month)) > self._clock.now():
            raise InvalidValue(f"{month} has not begun", param="month")
        if only is not None and check_choice(only, "only", DRAFT_CONDITIONS) == CLOSABLE:
            self._check_month_over(month)
        async with self._db.reading() as connection:  # computed before it is stored: a refusal leaves no draft behind
            head = await self._get_or_create(connection, tenant_id, month, store=False)
            computed = await self._computer.compute(connection, head)
        if only is not None and not computed.invoice.lines:
            if only == CLOSABLE and computed.first_open_month is not None:
                raise EarlierMonthOpen(_must_be_closed_before(computed.first_open_month, month), param="month")
            raise NothingToBill(f"{month} has nothing to bill", param="month")
        async with self._db.writing() as connection:
            await lock(connection, POSTING)
            head = await self._get_or_create(connection, tenant_id, month, store=True)
        return dataclasses.replace(computed.invoice, head=head)

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
        if expected_total_micros is not None:
            check_whole(expected_total_micros, "expected_total_micros", -TOTAL_MICROS_MAX, TOTAL_MICROS_MAX)
        if expected_currency is not None:
            check_currency(expected_currency, "expected_currency")
        async with self._db.reading() as connection:
            head = await _read_head(connection, invoice_id, access, Action.BILLING)
            check_draft(head)
            self._check_month_over(head.month)
            ahead = await read_sums_ahead(connection, head)
        async with self._db.writing() as connection:
            through = await lock(connection, POSTING)
            head = await _read_head(connection, invoice_id, access, Action.BILLING)
            check_draft(head)
            previous = await rows.read_last_coverage(connection, head.tenant_id)
            sums = await complete_sums(connection, head, previous, through, ahead)
            computed = await self._computer.compute_from_sums(connection, head, previous, sums)
            if computed.first_open_month is not None:
                raise MonthOutOfOrder(_must_be_closed_before(computed.first_open_month, head.month), param="month")
            _check_total(computed.invoice, expected_total_micros, expected_currency)
            return await self._store_closed(connection, computed.invoice, through)

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
            await self._discard(connection, head)

    async def _get_or_create(self, connection: AsyncConnection, tenant_id: str, month: str, *, store: bool) -> InvoiceHead:
        """Return the existing draft or a new one, inserting it if `store`. Raises NotFound, InvoiceClosed, MonthOutOfOrder."""
        buyer = await rows.read_buyer(connection, tenant_id)
        if buyer is None:
            raise NotFound("no such tenant", param="tenant_id")
        head = await rows.read_month(connection, tenant_id, month)
        if head is None:
            head = await self._new_head(connection, tenant_id, month, buyer.currency or self._currency)
            if store:
                await rows.insert_draft(connection, head)
                after = {"month": month}
                await audit.record(
                    connection, self._clock, "invoice.draft", "invoice", head.id, tenant_id=tenant_id, after=after
                )
        check_draft(head, param="month")
        return head

    async def _new_head(self, connection: AsyncConnection, tenant_id: str, month: str, currency: str) -> InvoiceHead:
        """Return the head of a new draft, not yet inserted. Raises MonthOutOfOrder."""
        previous = await rows.read_last_coverage(connection, tenant_id)
        if previous is not None and month < previous.month:
            message = f"{previous.month} is already closed: usage missing from {month} will be on the next invoice"
            raise MonthOutOfOrder(message, param="month")
        return InvoiceHead(
            id=new_id("inv"),
            tenant_id=tenant_id,
            month=month,
            number=None,
            state="draft",
            currency=currency,
            total_micros=0,
            tax_micros=0,
            through_posting=None,
            seller=None,
            buyer=None,
            created_at=self._clock.now(),
            closed_at=None,
        )

    async def _store_closed(self, connection: AsyncConnection, invoice: Invoice, through: int) -> Invoice:
        now = self._clock.now()
        year = self._calendar.day_of(now).year
        number = f"{year}-{await take(connection, f'invoice:{year}'):04d}"
        head = dataclasses.replace(
            invoice.head,
            number=number,
            state="closed",
            currency=invoice.currency,
            total_micros=invoice.totals.total_micros,
            tax_micros=invoice.totals.tax_micros,
            through_posting=through,
            seller=invoice.seller,
            buyer=invoice.buyer,
            closed_at=now,
        )
        closed = dataclasses.replace(invoice, head=head)
        if not await rows.store_closed(connection, closed):
            raise InvoiceClosed(f"the invoice of {head.month} is closed and never changes", param="invoice_id")
        tenant = await rows.read_buyer(connection, head.tenant_id)
        assert tenant is not None, "an invoice has a tenant"
        data = closed.alert_data(tenant.name)
        await connection.run_sync(
            outbox.enqueue, now, event="invoice.closed", subject=head.id, data=data, tenant_id=head.tenant_id
        )
        for empty in await rows.read_earlier_drafts(connection, head):  # with lines, the month would be out of order
            await self._discard(connection, empty)
        facts = rows.closing_facts(head)
        await audit.record(
            connection, self._clock, "invoice.close", "invoice", head.id, tenant_id=head.tenant_id, before={}, after=facts
        )
        return closed

    async def _discard(self, connection: AsyncConnection, draft: InvoiceHead) -> None:
        await rows.delete_draft(connection, draft.id)
        before = {"month": draft.month}
        await audit.record(
            connection, self._clock, "invoice.discard", "invoice", draft.id, tenant_id=draft.tenant_id, before=before
        )

    async def _load(self, connection: AsyncConnection, heads: Sequence[InvoiceHead]) -> Sequence[Invoice]:
        """Return the invoices of these heads: closed ones with their stored lines, drafts recomputed where possible."""
        lines = await rows.read_lines(connection, [head.id for head in heads if head.state == "closed"])
        return [
            await self._computer.try_compute(connection, head)
            if head.state == "draft"
            else rows.closed_invoice(head, lines[head.id])
            for head in heads
        ]

    def _check_month_over(self, month: str) -> None:
        end = self._calendar.next_month_start(month)
        if self._clock.now() < end:
            until = f"{end:%Y-%m-%d %H:%M} UTC"
            raise MonthNotOver(f"{month} is not over before {until}; until then its invoice stays a draft", param="month")


async def _read_head(connection: AsyncConnection, invoice_id: str, access: Access, action: Action) -> InvoiceHead:
    head = await rows.read_head(connection, invoice_id)
    return access.row(head, action, what="invoice", param="invoice_id")


def check_draft(head: InvoiceHead, *, param: str = "invoice_id") -> None:
    """Raise InvoiceClosed if the invoice is no longer a draft; `param` is the request field that named it."""
    if head.state != "draft":
        raise InvoiceClosed(
            f"the invoice of {head.month} is closed as {head.number} and never changes; later usage is on the next invoice",
            param=param,
        )


def _check_total(invoice: Invoice, expected_micros: int | None, expected_currency: str | None) -> None:
    """Raise TotalChanged, with both amounts, if total or currency of the invoice are not those expected (None: any)."""
    month, total_micros, currency = invoice.head.month, invoice.totals.total_micros, invoice.currency
    micros = total_micros if expected_micros is None else expected_micros
    if (micros, expected_currency or currency) == (total_micros, currency):
        return
    total, expected = f"{format_micros(total_micros)} {currency}", f"{format_micros(micros)} {expected_currency or currency}"
    message = f"the total of {month} is {total}, not {expected}: check the draft again"
    raise TotalChanged(message, param="expected_total_micros" if micros != total_micros else "expected_currency")


def _must_be_closed_before(earlier: str, month: str) -> str:
    return f"{earlier} must be closed before {month}: it has usage on no invoice yet"
