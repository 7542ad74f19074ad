"""Drafts or closes the invoices of a few tenants for one month together: in one transaction, with an outcome for each tenant.

An error about one tenant does not stop the others. While a transaction closes invoices it locks the posting counter, so that no
event can be posted: every posted event is visible to it, and any event posted later goes to a later invoice. The lock blocks
all requests, so nearly everything is summed before taking it; only the events posted in between are added under the lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.clock import Clock
from appliance.base.counters import POSTING, lock, take
from appliance.base.db import Database
from appliance.base.errors import (
    DraftUncomputable,
    EarlierMonthOpen,
    GatehouseError,
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
from appliance.metering.calendar import BillingCalendar
from appliance.metering.invoicing import rows
from appliance.metering.invoicing.computation import ComputedInvoice, InvoiceComputer, complete_sums, read_sums_ahead
from appliance.metering.invoicing.rows import TOTAL_MICROS_MAX, Invoice, InvoiceHead
from appliance.metering.invoicing.sums import Coverage
from appliance.tenancy import audit
from appliance.tenancy.access import Access
from appliance.tenancy.fields import check_currency, check_whole
from appliance.tenancy.roles import Action

BILLABLE, CLOSABLE = DRAFT_CONDITIONS = ("billable", "closable")

Outcome = Invoice | GatehouseError
"""An invoice, or why it could not be drafted or closed."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The total and currency that an invoice must have to be closed; None: any. Raises InvalidValue for impossible values."""

    total_micros: int | None = None
    currency: str | None = None

    def __post_init__(self) -> None:
        if self.total_micros is not None:
            check_whole(self.total_micros, "expected_total_micros", -TOTAL_MICROS_MAX, TOTAL_MICROS_MAX)
        if self.currency is not None:
            check_currency(self.currency, "expected_currency")


class Portions:
    """Drafts and closes invoices; `currency` is that of tenants without one of their own."""

    def __init__(
        self, db: Database, clock: Clock, calendar: BillingCalendar, computer: InvoiceComputer, *, currency: str
    ) -> None:
        self._db = db
        self._clock = clock
        self._calendar = calendar
        self._computer = computer
        self._currency = currency

    async def draft(self, tenant_ids: Sequence[str], month: str, only: str | None) -> dict[str, Outcome]:
        """Do what `Invoices.draft_each` does, for a month that has begun. Checks no permission."""
        outcomes: dict[str, Outcome] = {}
        async with self._db.reading() as connection:  # computed before it is stored: a refusal leaves no draft behind
            heads, _new = await self._find_or_make(connection, tenant_ids, month, outcomes)
            computed = await self._computer.compute_month(connection, month, heads)
        invoices: dict[str, Invoice] = {}
        for head in heads:
            with _refusals(outcomes, head.tenant_id):
                invoices[head.tenant_id] = _drafted(computed[head.id], only)
        if not invoices:
            return outcomes
        async with self._db.writing() as connection:
            await lock(connection, POSTING)
            heads, new = await self._find_or_make(connection, list(invoices), month, outcomes)
            if new:
                await rows.insert_drafts(connection, new)
                changes = [audit.Change(head.id, head.tenant_id, after={"month": month}) for head in new]
                await audit.record_each(connection, self._clock, "invoice.draft", "invoice", changes)
        return outcomes | {head.tenant_id: replace(invoices[head.tenant_id], head=head) for head in heads}

    async def _find_or_make(
        self, connection: AsyncConnection, tenant_ids: Sequence[str], month: str, outcomes: dict[str, Outcome]
    ) -> tuple[list[InvoiceHead], list[InvoiceHead]]:
        """Return (the tenants' drafts of a month, those of them that are new and not stored). Into `outcomes` go NotFound,
        InvoiceClosed and MonthOutOfOrder."""
        buyers = await rows.read_buyers(connection, tenant_ids)
        existing = await rows.read_month(connection, tenant_ids, month)
        previous = await rows.read_last_coverages(connection, tenant_ids)
        heads, new = [], []
        new_ids = sorted(new_id("inv") for _ in tenant_ids)  # lists are in the order of ids
        for invoice_id, tenant_id in zip(new_ids, tenant_ids, strict=True):
            with _refusals(outcomes, tenant_id):
                if tenant_id not in buyers:
                    raise NotFound("no such tenant", param="tenant_id")
                head = existing.get(tenant_id)
                if head is None:
                    currency = buyers[tenant_id].currency or self._currency
                    head = self._new_head(invoice_id, tenant_id, month, currency, previous[tenant_id])
                    new.append(head)
                check_draft(head, param="month")
                heads.append(head)
        return heads, new

    def _new_head(self, invoice_id: str, tenant_id: str, month: str, currency: str, previous: Coverage | None) -> InvoiceHead:
        """Return the head of a new draft, not yet inserted. Raises MonthOutOfOrder."""
        if previous is not None and month < previous.month:
            message = f"{previous.month} is already closed: usage missing from {month} will be on the next invoice"
            raise MonthOutOfOrder(message, param="month")
        return InvoiceHead(
            id=invoice_id,
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

    async def close(self, expected: Mapping[str, Expected], access: Access) -> dict[str, Outcome]:
        """Do what `Invoices.close_each` does."""
        outcomes: dict[str, Outcome] = {}
        async with self._db.reading() as connection:
            drafts = await self._read_closable(connection, list(expected), access, outcomes)
            if not drafts:
                return outcomes
            (month,) = {head.month for head in drafts}
            ahead = await read_sums_ahead(connection, month, [head.tenant_id for head in drafts])
        async with self._db.writing() as connection:
            through = await lock(connection, POSTING)
            drafts = await self._read_closable(connection, [head.id for head in drafts], access, outcomes)
            previous = await rows.read_last_coverages(connection, [head.tenant_id for head in drafts])
            sums = await complete_sums(connection, previous, through, ahead)
            computed = await self._computer.compute_from_sums(connection, month, drafts, previous, sums)
            closable = []
            for head in drafts:
                with _refusals(outcomes, head.id):
                    closable.append(_closable(computed[head.id], expected[head.id]))
            if closable:
                closed = await self._store_closed(connection, month, closable, through)
                outcomes |= {invoice.head.id: invoice for invoice in closed}
        return outcomes

    async def _read_closable(
        self, connection: AsyncConnection, invoice_ids: Sequence[str], access: Access, outcomes: dict[str, Outcome]
    ) -> list[InvoiceHead]:
        """Return the drafts of months that are over. Into `outcomes` go RoleNotAllowed, NotFound, InvoiceClosed and
        MonthNotOver."""
        found = await rows.read_heads(connection, invoice_ids)
        drafts = []
        for invoice_id in invoice_ids:
            with _refusals(outcomes, invoice_id):
                head = access.row(found.get(invoice_id), Action.BILLING, what="invoice", param="invoice_id")
                check_draft(head)
                self.check_month_over(head.month)
                drafts.append(head)
        return drafts

    async def _store_closed(
        self, connection: AsyncConnection, month: str, invoices: Sequence[Invoice], through: int
    ) -> list[Invoice]:
        """Number and store invoices in their order, with their messages and audit entries; discard their tenants' earlier,
        empty drafts."""
        now = self._clock.now()
        year = self._calendar.day_of(now).year
        first = await take(connection, f"invoice:{year}", len(invoices))
        closed = [
            invoice.closed(f"{year}-{number:04d}", through_posting=through, at=now)
            for number, invoice in enumerate(invoices, first)
        ]
        await rows.store_closed(connection, closed)
        tenant_ids = [invoice.head.tenant_id for invoice in closed]
        buyers = await rows.read_buyers(connection, tenant_ids)
        messages = [
            outbox.Message("invoice.closed", invoice.head.id, invoice.alert_data(buyers[tenant_id].name), tenant_id)
            for invoice, tenant_id in zip(closed, tenant_ids, strict=True)
        ]
        await connection.run_sync(outbox.enqueue, now, messages)
        # With lines, the month would be out of order.
        await self.discard(connection, await rows.read_earlier_drafts(connection, tenant_ids, month))
        changes = [
            audit.Change(invoice.head.id, tenant_id, before={}, after=rows.closing_facts(invoice.head))
            for invoice, tenant_id in zip(closed, tenant_ids, strict=True)
        ]
        await audit.record_each(connection, self._clock, "invoice.close", "invoice", changes)
        return closed

    async def discard(self, connection: AsyncConnection, drafts: Sequence[InvoiceHead]) -> None:
        """Delete these drafts."""
        if not drafts:
            return
        await rows.delete_drafts(connection, [draft.id for draft in drafts])
        changes = [audit.Change(draft.id, draft.tenant_id, before={"month": draft.month}) for draft in drafts]
        await audit.record_each(connection, self._clock, "invoice.discard", "invoice", changes)

    def check_month_over(self, month: str) -> None:
        """Raise MonthNotOver."""
        end = self._calendar.next_month_start(month)
        if self._clock.now() < end:
            until = f"{end:%Y-%m-%d %H:%M} UTC"
            raise MonthNotOver(f"{month} is not over before {until}; until then its invoice stays a draft", param="month")


def check_draft(head: InvoiceHead, *, param: str = "invoice_id") -> None:
    """Raise InvoiceClosed if the invoice is no longer a draft; `param` is the request field that named it."""
    if head.state != "draft":
        raise InvoiceClosed(
            f"the invoice of {head.month} is closed as {head.number} and never changes; later usage is on the next invoice",
            param=param,
        )


def _drafted(computed: ComputedInvoice | DraftUncomputable, only: str | None) -> Invoice:
    """Return the invoice of a draft that meets the condition `only`. Raises EarlierMonthOpen, NothingToBill, and
    DraftUncomputable."""
    if isinstance(computed, DraftUncomputable):
        raise computed
    month = computed.invoice.head.month
    if only == CLOSABLE and computed.first_open_month is not None:
        raise EarlierMonthOpen(_must_be_closed_before(computed.first_open_month, month), param="month")
    if only is not None and not computed.invoice.lines:
        raise NothingToBill(f"{month} has nothing to bill", param="month")
    return computed.invoice


def _closable(computed: ComputedInvoice | DraftUncomputable, expected: Expected) -> Invoice:
    """Return the invoice to close. Raises MonthOutOfOrder, TotalChanged, and DraftUncomputable."""
    if isinstance(computed, DraftUncomputable):
        raise computed
    invoice = computed.invoice
    if computed.first_open_month is not None:
        raise MonthOutOfOrder(_must_be_closed_before(computed.first_open_month, invoice.head.month), param="month")
    _check_total(invoice, expected.total_micros, expected.currency)
    return invoice


@contextmanager
def _refusals(outcomes: dict[str, Outcome], key: str) -> Iterator[None]:
    """Put the error that the block raises about one tenant or invoice into `outcomes`, so that it does not stop the others."""
    try:
        yield
    except GatehouseError as error:
        outcomes[key] = error


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
