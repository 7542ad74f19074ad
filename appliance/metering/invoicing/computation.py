"""Computes the invoice of a tenant and month from the ledger as it is now. Writes nothing, and knows no states of invoices.

The sums can be read in two parts: nearly all of them ahead, and what was posted since then under the lock of the posting
counter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.counters import POSTING, last_taken
from appliance.base.errors import DraftUncomputable, InvoiceInconsistent
from appliance.metering.appliance_records import SELLER, read_record
from appliance.metering.calendar import BillingCalendar, first_day
from appliance.metering.invoicing import rows
from appliance.metering.invoicing.lines import EventSums, allowance_lines, currency_of, totals_of, usage_lines
from appliance.metering.invoicing.rows import TIME_ZONE, Invoice, InvoiceHead
from appliance.metering.invoicing.sums import Coverage, read_event_sums

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ComputedInvoice:
    """An invoice computed now. `first_open_month` is the earliest preceding month that has usage and is not closed yet."""

    invoice: Invoice
    first_open_month: str | None


@dataclass(frozen=True, slots=True)
class SumsAhead:
    """Sums of the events in `coverage` but not in `previous`, read before the posting counter is locked."""

    previous: Coverage | None
    coverage: Coverage
    sums: Sequence[EventSums]


class InvoiceComputer:
    """Computes invoices with the days of `calendar`; `currency` is that of tenants without one of their own."""

    def __init__(self, calendar: BillingCalendar, *, currency: str) -> None:
        self._calendar = calendar
        self._currency = currency

    async def compute(self, connection: AsyncConnection, head: InvoiceHead) -> ComputedInvoice:
        """Return the invoice with everything that is posted now. Raises DraftUncomputable."""
        ahead = await read_sums_ahead(connection, head)
        return await self.compute_from_sums(connection, head, ahead.previous, ahead.sums)

    async def try_compute(self, connection: AsyncConnection, head: InvoiceHead) -> Invoice:
        """Return the draft; one that cannot be computed has a `problem` instead of lines."""
        try:
            return (await self.compute(connection, head)).invoice
        except DraftUncomputable as error:
            buyer = await rows.read_buyer(connection, head.tenant_id)
            assert buyer is not None, "an invoice refers to its tenant"
            return rows.uncomputable_draft(head, buyer, buyer.currency or self._currency, error.message)

    async def compute_from_sums(
        self, connection: AsyncConnection, head: InvoiceHead, previous: Coverage | None, sums: Sequence[EventSums]
    ) -> ComputedInvoice:
        """Return the invoice with the events in `sums`. Raises DraftUncomputable."""
        month = head.month
        first_open_month = _first_open_month(sums, month, previous)
        if first_open_month is not None:  # late events go to that month's invoice, not to this one
            sums = [group for group in sums if group.month == month]
        try:
            lines = usage_lines(sums, month)
        except InvoiceInconsistent as error:
            _log.error("invoice_inconsistent", tenant_id=head.tenant_id, month=month, reason=error.message)
            raise
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
        return ComputedInvoice(invoice, first_open_month)


async def read_sums_ahead(connection: AsyncConnection, head: InvoiceHead) -> SumsAhead:
    """Return the sums of all that is posted now and on no invoice."""
    previous = await rows.read_last_coverage(connection, head.tenant_id)
    coverage = Coverage(head.month, await last_taken(connection, POSTING))
    return SumsAhead(previous, coverage, await read_event_sums(connection, head.tenant_id, coverage, previous))


async def coverage_of(connection: AsyncConnection, head: InvoiceHead) -> tuple[Coverage, Coverage | None, date | None]:
    """Return (coverage, coverage of the preceding closed invoice, first billing day). The first billing day is that of the
    month for a draft that bills no late events, because an earlier month is still open; otherwise None."""
    if head.through_posting is not None:
        previous = await rows.read_last_coverage(connection, head.tenant_id, before=head.month)
        return Coverage(head.month, head.through_posting), previous, None
    ahead = await read_sums_ahead(connection, head)
    is_next = _first_open_month(ahead.sums, head.month, ahead.previous) is None
    return ahead.coverage, ahead.previous, None if is_next else first_day(head.month)


async def complete_sums(
    connection: AsyncConnection, head: InvoiceHead, previous: Coverage | None, through: int, ahead: SumsAhead
) -> Sequence[EventSums]:
    """Add the events posted since `ahead` was read; read everything again if another month was closed in between."""
    coverage = Coverage(head.month, through)
    if previous != ahead.previous:
        return await read_event_sums(connection, head.tenant_id, coverage, previous)
    return [*ahead.sums, *await read_event_sums(connection, head.tenant_id, coverage, ahead.coverage)]


def _first_open_month(sums: Sequence[EventSums], month: str, previous: Coverage | None) -> str | None:
    """Return the earliest month before `month` that is not closed and whose invoice would have lines, or None."""
    last_closed = "" if previous is None else previous.month
    for earlier in sorted({group.month for group in sums if last_closed < group.month < month}):
        if _has_lines([group for group in sums if group.month == earlier], earlier):
            return earlier
    return None


def _has_lines(sums: Sequence[EventSums], month: str) -> bool:
    try:
        return bool(usage_lines(sums, month))
    except InvoiceInconsistent:
        return True
