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
from dataclasses import dataclass
from datetime import date

from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.clock import Clock
from appliance.base.counters import POSTING, last_taken, lock, take
from appliance.base.db import Database
from appliance.base.errors import (
    CurrenciesMixed,
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
from appliance.metering.appliance_records import SELLER, read_record
from appliance.metering.calendar import BillingCalendar, first_day
from appliance.metering.invoicing import rows
from appliance.metering.invoicing.lines import (
    EventSums,
    allowance_lines,
    currency_of,
    totals_of,
    usage_lines,
)
from appliance.metering.invoicing.rows import TIME_ZONE, TOTAL_MICROS_MAX, Invoice, InvoiceHead
from appliance.metering.invoicing.sums import Coverage, read_covered_events, read_event_sums
from appliance.metering.ledger.records import UsageEvent
from appliance.tenancy import audit
from appliance.tenancy.access import Access
from appliance.tenancy.fields import check_choice, check_whole
from appliance.tenancy.pages import PAGE_ROWS_DEFAULT, Page, check_limit, decode_cursor, page_of
from appliance.tenancy.roles import Action

BILLABLE, CLOSABLE = DRAFT_CONDITIONS = ("billable", "closable")
FIRST_DAY = date(2000, 1, 1)  # no appliance has earlier usage, and later dates cause no calendar problems


@dataclass(frozen=True, slots=True)
class _ComputedInvoice:
    """An invoice computed now. `first_open_month` is the earliest preceding month that has usage and is not closed yet."""

    invoice: Invoice
    first_open_month: str | None


@dataclass(frozen=True, slots=True)
class _SumsAhead:
    """Sums of the events in `coverage` but not in `previous`, read before the posting counter is locked."""

    previous: Coverage | None
    coverage: Coverage
    sums: Sequence[EventSums]


class Invoices:
    """The invoices of all tenants."""

    def __init__(self, db: Database, clock: Clock, calendar: BillingCalendar, *, currency: str) -> None:
        self._db = db
        self._clock = clock
        self._calendar = calendar
        self._currency = currency

    async def draft(self, tenant_id: str, month: str, *, only: str | None = None, access: Access) -> Invoice:
        """Create, or return, the draft of a month (`YYYY-MM`) that has begun.

        `only` is one of DRAFT_CONDITIONS. `billable`: raises NothingToBill instead of creating an empty draft; `closable`: also
        raises MonthNotOver before the month is over, and EarlierMonthOpen instead of NothingToBill if an earlier month has
        something to bill. Raises NotFound, RoleNotAllowed, InvalidValue, InvoiceClosed, CurrenciesMixed, and MonthOutOfOrder
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
            computed = await self._compute_draft(connection, head)
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
        """Return an invoice; a draft is computed now. Raises the errors of `head`, and CurrenciesMixed."""
        async with self._db.reading() as connection:
            invoice = (await self._load(connection, [await _read_head(connection, invoice_id, access, action)]))[0]
        if invoice.problem is not None:
            raise CurrenciesMixed(invoice.problem, param="month")
        return invoice

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

    async def close(self, invoice_id: str, *, expected_total_micros: int | None = None, access: Access) -> Invoice:
        """Close the invoice and return it: it gets a number and never changes again.

        Raises the errors of `head`, InvoiceClosed, MonthNotOver, MonthOutOfOrder (naming the month to close first),
        CurrenciesMixed, and TotalChanged if `expected_total_micros` is given and not the total; on an error nothing has changed
        and no number is used up.
        """
        if expected_total_micros is not None:
            check_whole(expected_total_micros, "expected_total_micros", -TOTAL_MICROS_MAX, TOTAL_MICROS_MAX)
        async with self._db.reading() as connection:
            head = await _read_head(connection, invoice_id, access, Action.BILLING)
            check_draft(head)
            self._check_month_over(head.month)
            ahead = await _read_sums_ahead(connection, head)
        async with self._db.writing() as connection:
            through = await lock(connection, POSTING)
            head = await _read_head(connection, invoice_id, access, Action.BILLING)
            check_draft(head)
            previous = await rows.read_last_coverage(connection, head.tenant_id)
            sums = await _complete_sums(connection, head, previous, through, ahead)
            computed = await self._compute(connection, head, previous, sums)
            if computed.first_open_month is not None:
                raise MonthOutOfOrder(_must_be_closed_before(computed.first_open_month, head.month), param="month")
            if expected_total_micros is not None:
                _check_total(computed.invoice, expected_total_micros)
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
            covered = await _coverage_of(connection, head)
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
            rows.closed_invoice(head, lines[head.id]) if head.state == "closed" else await self._try_draft(connection, head)
            for head in heads
        ]

    async def _compute_draft(self, connection: AsyncConnection, head: InvoiceHead) -> _ComputedInvoice:
        ahead = await _read_sums_ahead(connection, head)
        return await self._compute(connection, head, ahead.previous, ahead.sums)

    async def _try_draft(self, connection: AsyncConnection, head: InvoiceHead) -> Invoice:
        try:
            return (await self._compute_draft(connection, head)).invoice
        except CurrenciesMixed as error:
            buyer = await rows.read_buyer(connection, head.tenant_id)
            assert buyer is not None, "an invoice refers to its tenant"
            return rows.uncomputable_draft(head, buyer, buyer.currency or self._currency, error.message)

    async def _compute(
        self, connection: AsyncConnection, head: InvoiceHead, previous: Coverage | None, sums: Sequence[EventSums]
    ) -> _ComputedInvoice:
        month = head.month
        first_open_month = _first_open_month(sums, month, previous)
        if first_open_month is not None:  # late events go to that month's invoice, not to this one
            sums = [group for group in sums if group.month == month]
        lines = usage_lines(sums, month)
        months = {month, *(line.month for line in lines)}
        lines += allowance_lines(lines, await rows.read_month_allowances(connection, head.tenant_id, months))
        buyer = await rows.read_buyer(connection, head.tenant_id)
        assert buyer is not None, "an invoice refers to its tenant"
        currency = currency_of(sums, month) or buyer.currency or self._currency
        record = await read_record(connection, SELLER)
        seller = {**(record.value if record else {}), TIME_ZONE: self._calendar.time_zone}
        invoice = Invoice(
            head=head,
            currency=currency,
            lines=tuple(lines),
            totals=totals_of(lines, tax_basis_points=seller.get("tax_basis_points", 0), currency=currency),
            seller=seller,
            buyer={"name": buyer.name, **buyer.billing},
        )
        return _ComputedInvoice(invoice, first_open_month)

    def _check_month_over(self, month: str) -> None:
        end = self._calendar.next_month_start(month)
        if self._clock.now() < end:
            until = f"{end:%Y-%m-%d %H:%M} UTC"
            raise MonthNotOver(f"{month} is not over before {until}; until then its invoice stays a draft", param="month")


async def _read_head(connection: AsyncConnection, invoice_id: str, access: Access, action: Action) -> InvoiceHead:
    head = await rows.read_head(connection, invoice_id)
    return access.row(head, action, what="invoice", param="invoice_id")


async def _read_sums_ahead(connection: AsyncConnection, head: InvoiceHead) -> _SumsAhead:
    previous = await rows.read_last_coverage(connection, head.tenant_id)
    coverage = Coverage(head.month, await last_taken(connection, POSTING))
    return _SumsAhead(previous, coverage, await read_event_sums(connection, head.tenant_id, coverage, previous))


async def _coverage_of(connection: AsyncConnection, head: InvoiceHead) -> tuple[Coverage, Coverage | None, date | None]:
    """Return (coverage, coverage of the preceding closed invoice, first billing day). The first billing day is that of the
    month for a draft that bills no late events, because an earlier month is still open; otherwise None."""
    if head.through_posting is not None:
        previous = await rows.read_last_coverage(connection, head.tenant_id, before=head.month)
        return Coverage(head.month, head.through_posting), previous, None
    ahead = await _read_sums_ahead(connection, head)
    is_next = _first_open_month(ahead.sums, head.month, ahead.previous) is None
    return ahead.coverage, ahead.previous, None if is_next else first_day(head.month)


async def _complete_sums(
    connection: AsyncConnection, head: InvoiceHead, previous: Coverage | None, through: int, ahead: _SumsAhead
) -> Sequence[EventSums]:
    """Add the events posted since `ahead` was read; read everything again if another month was closed in between."""
    coverage = Coverage(head.month, through)
    if previous != ahead.previous:
        return await read_event_sums(connection, head.tenant_id, coverage, previous)
    return [*ahead.sums, *await read_event_sums(connection, head.tenant_id, coverage, ahead.coverage)]


def check_draft(head: InvoiceHead, *, param: str = "invoice_id") -> None:
    """Raise InvoiceClosed if the invoice is no longer a draft; `param` is the request field that named it."""
    if head.state != "draft":
        raise InvoiceClosed(
            f"the invoice of {head.month} is closed as {head.number} and never changes; later usage is on the next invoice",
            param=param,
        )


def _check_total(invoice: Invoice, expected_micros: int) -> None:
    """Raise TotalChanged, with both amounts, if `expected_micros` is not the total of the invoice."""
    total_micros = invoice.totals.total_micros
    if total_micros != expected_micros:
        total, expected = (f"{format_micros(micros)} {invoice.currency}" for micros in (total_micros, expected_micros))
        message = f"the total of {invoice.head.month} is {total}, not {expected}: check the draft again"
        raise TotalChanged(message, param="expected_total_micros")


def _must_be_closed_before(earlier: str, month: str) -> str:
    return f"{earlier} must be closed before {month}: it has usage on no invoice yet"


def _first_open_month(sums: Sequence[EventSums], month: str, previous: Coverage | None) -> str | None:
    """Return the earliest month before `month` that is not closed and whose invoice would have lines, or None."""
    last_closed = "" if previous is None else previous.month
    for earlier in sorted({group.month for group in sums if last_closed < group.month < month}):
        if usage_lines([group for group in sums if group.month == earlier], earlier):
            return earlier
    return None
