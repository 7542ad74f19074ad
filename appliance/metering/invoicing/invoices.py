"""Invoices of a tenant and month: drafted, closed in order, read. Postings, never a clock, decide what is on an invoice.

                 ┌── computed anew each time it is requested
 (nothing) ──► draft ──► closed: number, lines, totals, seller, buyer and what it covers are stored and never change
                 month over, earlier months closed; in one transaction that holds the posting counter

While the counter is held, no event gets a posting: events with one are visible here, events that get one later are late. All
requests wait meanwhile, so nearly everything is summed before, and only what was posted since is added while it is held.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from sqlalchemy import Select, and_, or_
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.clock import Clock
from appliance.base.counters import POSTING, last_taken, lock, take
from appliance.base.db import Database
from appliance.base.errors import (
    CurrenciesMixed,
    InvalidValue,
    InvoiceClosed,
    MonthNotOver,
    MonthOutOfOrder,
    NotFound,
    NothingToBill,
)
from appliance.base.ids import new_id
from appliance.base.tables import invoices
from appliance.metering.alerts import outbox
from appliance.metering.box_records import SELLER, read_record
from appliance.metering.calendar import BillingCalendar, first_day
from appliance.metering.invoicing import rows
from appliance.metering.invoicing.free_allowances import free_in, read_allowances
from appliance.metering.invoicing.lines import (
    EventSums,
    FreeMonth,
    InvoiceLine,
    allowance_lines,
    currency_of,
    totals_of,
    usage_lines,
)
from appliance.metering.invoicing.rows import TIME_ZONE, Invoice, InvoiceHead
from appliance.metering.invoicing.sums import Cover, read_covered_events, read_event_sums
from appliance.metering.ledger.records import UsageEvent
from appliance.tenancy import audit
from appliance.tenancy.access import Access
from appliance.tenancy.fields import check_choice
from appliance.tenancy.pages import PAGE_ROWS_DEFAULT, Page, check_limit, decode_cursor, page_of
from appliance.tenancy.roles import Action

BILLABLE, CLOSABLE = ONLY = ("billable", "closable")
FIRST_DAY = date(2000, 1, 1)  # no appliance has usage before it, and dates after it cause no calendar trouble


@dataclass(frozen=True, slots=True)
class _Content:
    """An invoice as it would be now. `open_before` is the first earlier month that still has usage of its own to close."""

    invoice: Invoice
    open_before: str | None


@dataclass(frozen=True, slots=True)
class _Ahead:
    """The sums of what `cover` covers and `before` does not, read before the posting counter is held."""

    before: Cover | None
    cover: Cover
    sums: Sequence[EventSums]


class Invoices:
    """The invoices of all tenants."""

    def __init__(self, db: Database, clock: Clock, calendar: BillingCalendar, *, currency: str) -> None:
        self._db = db
        self._clock = clock
        self._calendar = calendar
        self._currency = currency

    async def draft(self, tenant_id: str, month: str, *, only: str | None = None, access: Access) -> Invoice:
        """Return the draft of a month (`YYYY-MM`) that has begun; the same one when there is one already.

        `only` is one of ONLY: then no draft is made if there is nothing to bill (raises NothingToBill), nor, with `closable`,
        before the month is over (MonthNotOver). Raises NotFound, RoleNotAllowed, InvalidValue, InvoiceClosed, and
        MonthOutOfOrder when a later month is closed.
        """
        access.require(Action.BILLING, tenant_id)
        if first_day(month) < FIRST_DAY:
            raise InvalidValue(f"month must be {FIRST_DAY:%Y-%m} or later", param="month")
        if self._calendar.day_start(first_day(month)) > self._clock.now():
            raise InvalidValue(f"{month} has not begun", param="month")
        if only is not None:
            await self._check_worth_it(tenant_id, month, check_choice(only, "only", ONLY))
        async with self._db.writing() as connection:
            await lock(connection, POSTING)
            head = await self._draft_of(connection, tenant_id, month, keep=True)
        return await self.get(head.id, access=access)

    async def head(self, invoice_id: str, *, access: Access, action: Action = Action.INVOICES) -> InvoiceHead:
        """Return an invoice without its lines. Raises NotFound, also for another tenant's, and RoleNotAllowed."""
        async with self._db.reading() as connection:
            return await _read_head(connection, invoice_id, access, action)

    async def get(self, invoice_id: str, *, access: Access, action: Action = Action.INVOICES) -> Invoice:
        """Return an invoice, a draft as it would be now. Raises as `head`, and CurrenciesMixed."""
        async with self._db.reading() as connection:
            invoice = (await self._whole(connection, [await _read_head(connection, invoice_id, access, action)]))[0]
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
        """Return the invoices of every tenant that `access` shows, without lines, the newest month first."""
        async with self._db.reading() as connection:
            return await _page(connection, rows.heads_query(month=month, state=state), limit, cursor, access)

    async def list_of(
        self, tenant_id: str, limit: int = PAGE_ROWS_DEFAULT, cursor: str | None = None, *, access: Access
    ) -> Page[Invoice]:
        """Return the whole invoices of a tenant, the newest month first; a draft that cannot be computed says why."""
        access.require(Action.INVOICES, tenant_id)
        async with self._db.reading() as connection:
            page = await _page(connection, rows.heads_query(tenant_id=tenant_id), limit, cursor, access)
            whole = await self._whole(connection, page.data)
        return Page(data=[*whole], next_cursor=page.next_cursor)

    async def close(self, invoice_id: str, *, access: Access) -> Invoice:
        """Close the invoice and return it: it has a number and never changes.

        Raises as `head`, InvoiceClosed, MonthNotOver, MonthOutOfOrder (naming the month to close first) and CurrenciesMixed;
        then nothing has changed and no number is used.
        """
        async with self._db.reading() as connection:
            head = await _read_head(connection, invoice_id, access, Action.BILLING)
            check_draft(head)
            self._check_over(head.month)
            ahead = await _sum_ahead(connection, head)
        async with self._db.writing() as connection:
            through = await lock(connection, POSTING)
            head = await _read_head(connection, invoice_id, access, Action.BILLING)
            check_draft(head)
            before = await rows.read_last_cover(connection, head.tenant_id)
            sums = await _sums_since(connection, head, before, through, ahead)
            content = await self._content(connection, head, before, sums)
            if content.open_before is not None:
                message = f"{content.open_before} must be closed before {head.month}: it has usage that is on no invoice yet"
                raise MonthOutOfOrder(message, param="month")
            return await self._freeze(connection, content.invoice, through)

    async def events(
        self,
        invoice_id: str,
        limit: int = PAGE_ROWS_DEFAULT,
        cursor: str | None = None,
        *,
        kind: str | None = None,
        access: Access,
    ) -> Page[UsageEvent]:
        """Return the events that an invoice covers, of one `kind` or both, in the order of their postings. Raises NotFound."""
        after = 0 if cursor is None else decode_cursor("invoice_events", cursor, [int])[0]
        rows_max = check_limit(limit) + 1
        async with self._db.reading() as connection:
            head = await _read_head(connection, invoice_id, access, Action.INVOICES)
            cover, before, first = await _cover_of(connection, head)
            found = await read_covered_events(
                connection, head.tenant_id, cover, before, first=first, kind=kind, after_posting=after, rows_max=rows_max
            )
        return page_of(found, limit, "invoice_events", lambda event: [event.posting or 0])

    async def discard(self, invoice_id: str, *, access: Access) -> None:
        """Remove a draft. Raises NotFound, and InvoiceClosed if the invoice is closed."""
        async with self._db.writing() as connection:
            await lock(connection, POSTING)
            head = await _read_head(connection, invoice_id, access, Action.BILLING)
            check_draft(head)
            await rows.delete_draft(connection, head.id)
            before = {"month": head.month}
            await audit.record(
                connection, self._clock, "invoice.discard", "invoice", head.id, tenant_id=head.tenant_id, before=before
            )

    async def _check_worth_it(self, tenant_id: str, month: str, only: str) -> None:
        """Raise NothingToBill or MonthNotOver as `only` demands. An existing empty draft stays."""
        if only == CLOSABLE:
            self._check_over(month)
        async with self._db.reading() as connection:
            head = await self._draft_of(connection, tenant_id, month, keep=False)
            if not (await self._drafted(connection, head)).lines:
                raise NothingToBill(f"{month} has nothing to bill", param="month")

    async def _draft_of(self, connection: AsyncConnection, tenant_id: str, month: str, *, keep: bool) -> InvoiceHead:
        """Return the existing draft, or a new one, which is stored if `keep`."""
        buyer = await rows.read_buyer(connection, tenant_id)
        if buyer is None:
            raise NotFound("no such tenant", param="tenant_id")
        head = await rows.read_month(connection, tenant_id, month)
        if head is None:
            head = await self._begun(connection, tenant_id, month, buyer.currency or self._currency)
            if keep:
                await rows.insert_draft(connection, head)
                after = {"month": month}
                await audit.record(
                    connection, self._clock, "invoice.draft", "invoice", head.id, tenant_id=tenant_id, after=after
                )
        check_draft(head, param="month")
        return head

    async def _begun(self, connection: AsyncConnection, tenant_id: str, month: str, currency: str) -> InvoiceHead:
        """Return the head of a new draft, not yet stored. Raises MonthOutOfOrder."""
        before = await rows.read_last_cover(connection, tenant_id)
        if before is not None and month < before.month:
            message = f"{before.month} is already closed: usage missing from {month} will be on the next invoice"
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

    async def _freeze(self, connection: AsyncConnection, invoice: Invoice, through: int) -> Invoice:
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
        if not await rows.freeze(connection, closed):
            raise InvoiceClosed(f"the invoice of {head.month} is closed and never changes", param="invoice_id")
        tenant = await rows.read_buyer(connection, head.tenant_id)
        assert tenant is not None, "an invoice has a tenant"
        data = closed.announcement(tenant.name)
        await connection.run_sync(
            outbox.enqueue, now, event="invoice.closed", subject=head.id, data=data, tenant_id=head.tenant_id
        )
        facts = rows.closing_facts(head)
        await audit.record(
            connection, self._clock, "invoice.close", "invoice", head.id, tenant_id=head.tenant_id, before={}, after=facts
        )
        return closed

    async def _whole(self, connection: AsyncConnection, heads: Sequence[InvoiceHead]) -> Sequence[Invoice]:
        """Return the invoices of these heads: closed ones with their stored lines, drafts computed if possible."""
        lines = await rows.read_lines(connection, [head.id for head in heads if head.state == "closed"])
        return [
            rows.stored(head, lines[head.id]) if head.state == "closed" else await self._drafted_if_possible(connection, head)
            for head in heads
        ]

    async def _drafted(self, connection: AsyncConnection, head: InvoiceHead) -> Invoice:
        ahead = await _sum_ahead(connection, head)
        return (await self._content(connection, head, ahead.before, ahead.sums)).invoice

    async def _drafted_if_possible(self, connection: AsyncConnection, head: InvoiceHead) -> Invoice:
        try:
            return await self._drafted(connection, head)
        except CurrenciesMixed as error:
            return rows.not_drafted(head, await rows.read_buyer(connection, head.tenant_id), error.message)

    async def _content(
        self, connection: AsyncConnection, head: InvoiceHead, before: Cover | None, sums: Sequence[EventSums]
    ) -> _Content:
        month = head.month
        open_before = _open_before(sums, month, before)
        if open_before is not None:  # late events go to that month's invoice, not to this one
            sums = [group for group in sums if group.month == month]
        lines = usage_lines(sums, month)
        lines += allowance_lines(lines, await _free_months(connection, head.tenant_id, lines, month))
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
        return _Content(invoice, open_before)

    def _check_over(self, month: str) -> None:
        end = self._calendar.next_month_start(month)
        if self._clock.now() < end:
            until = f"{end:%Y-%m-%d %H:%M} UTC"
            raise MonthNotOver(f"{month} is not over before {until}; until then it is a draft", param="month")


async def _read_head(connection: AsyncConnection, invoice_id: str, access: Access, action: Action) -> InvoiceHead:
    head = await rows.read_head(connection, invoice_id)
    return access.row(head, action, what="invoice", param="invoice_id")


async def _sum_ahead(connection: AsyncConnection, head: InvoiceHead) -> _Ahead:
    before = await rows.read_last_cover(connection, head.tenant_id)
    cover = Cover(head.month, await last_taken(connection, POSTING))
    return _Ahead(before, cover, await read_event_sums(connection, head.tenant_id, cover, before))


async def _cover_of(connection: AsyncConnection, head: InvoiceHead) -> tuple[Cover, Cover | None, date | None]:
    """Return what an invoice covers and what those before it cover; also the first day of the month for a draft that gets no
    late events, because an earlier month is still open (else None)."""
    if head.through_posting is not None:
        before = await rows.read_last_cover(connection, head.tenant_id, before=head.month)
        return Cover(head.month, head.through_posting), before, None
    ahead = await _sum_ahead(connection, head)
    is_next = _open_before(ahead.sums, head.month, ahead.before) is None
    return ahead.cover, ahead.before, None if is_next else first_day(head.month)


async def _sums_since(
    connection: AsyncConnection, head: InvoiceHead, before: Cover | None, through: int, ahead: _Ahead
) -> Sequence[EventSums]:
    """Return the sums read ahead and those of events posted since; all sums anew if another month was closed in between."""
    cover = Cover(head.month, through)
    if before != ahead.before:
        return await read_event_sums(connection, head.tenant_id, cover, before)
    return [*ahead.sums, *await read_event_sums(connection, head.tenant_id, cover, ahead.cover)]


async def _page(
    connection: AsyncConnection, query: Select[Any], limit: int, cursor: str | None, access: Access
) -> Page[InvoiceHead]:
    query = access.narrow(query, invoices.c.tenant_id, Action.INVOICES)
    if cursor is not None:
        last_month, last_id = decode_cursor("invoices", cursor, [str, str])
        columns = invoices.c
        query = query.where(or_(columns.month < last_month, and_(columns.month == last_month, columns.id < last_id)))
    found = (await connection.execute(query.limit(check_limit(limit) + 1))).mappings().all()
    return page_of([rows.head_from_row(row) for row in found], limit, "invoices", lambda head: [head.month, head.id])


async def _free_months(
    connection: AsyncConnection, tenant_id: str, lines: Sequence[InvoiceLine], month: str
) -> dict[str, FreeMonth]:
    """Return the allowance of each month that the invoice bills, with what earlier invoices billed and gave free for it."""
    allowances = await read_allowances(connection, tenant_id)
    if not allowances:
        return {}
    months = {month, *(line.month for line in lines)}
    return await rows.read_free_months(connection, tenant_id, {of: free_in(allowances, of) for of in months})


def check_draft(head: InvoiceHead, *, param: str = "invoice_id") -> None:
    """Raise InvoiceClosed for an invoice that is no longer a draft; `param` is what named it."""
    if head.state != "draft":
        raise InvoiceClosed(
            f"the invoice of {head.month} is closed as {head.number} and never changes; what comes later is on the next one",
            param=param,
        )


def _open_before(sums: Sequence[EventSums], month: str, before: Cover | None) -> str | None:
    """Return the first month before `month` that is not closed and would have lines of its own."""
    newest = "" if before is None else before.month
    for of in sorted({group.month for group in sums if newest < group.month < month}):
        if usage_lines([group for group in sums if group.month == of], of):
            return of
    return None
