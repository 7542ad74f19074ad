"""Computes the invoices of tenants and a month from the ledger as it is now. Writes nothing, and knows no states of invoices.

The sums can be read in two parts: nearly all of them ahead, and what was posted since then under the lock of the posting
counter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.counters import POSTING, last_taken
from appliance.base.errors import DraftUncomputable, InvoiceInconsistent
from appliance.metering.appliance_records import SELLER, read_record
from appliance.metering.calendar import BillingCalendar, first_day
from appliance.metering.invoicing import rows
from appliance.metering.invoicing.lines import EventSums, InvoiceLine, allowance_lines, currency_of, totals_of, usage_lines
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
    """Sums by tenant of the events in `coverage` but not in `previous`, read before the posting counter is locked."""

    previous: Mapping[str, Coverage | None]
    coverage: Coverage
    sums: Mapping[str, Sequence[EventSums]]


class InvoiceComputer:
    """Computes invoices with the days of `calendar`; `currency` is that of tenants without one of their own."""

    def __init__(self, calendar: BillingCalendar, *, currency: str) -> None:
        self._calendar = calendar
        self._currency = currency

    async def compute(self, connection: AsyncConnection, head: InvoiceHead) -> ComputedInvoice:
        """Return the invoice with everything that is posted now. Raises DraftUncomputable."""
        computed = (await self.compute_month(connection, head.month, [head]))[head.id]
        if isinstance(computed, DraftUncomputable):
            raise computed
        return computed

    async def compute_month(
        self, connection: AsyncConnection, month: str, heads: Sequence[InvoiceHead]
    ) -> dict[str, ComputedInvoice | DraftUncomputable]:
        """Return the invoices of a month with everything that is posted now, or why one has no lines, by invoice id."""
        ahead = await read_sums_ahead(connection, month, [head.tenant_id for head in heads])
        return await self.compute_from_sums(connection, month, heads, ahead.previous, ahead.sums)

    async def try_compute(self, connection: AsyncConnection, month: str, heads: Sequence[InvoiceHead]) -> list[Invoice]:
        """Return the drafts of a month; one that cannot be computed has a `problem` instead of lines."""
        computed = await self.compute_month(connection, month, heads)
        buyers = await rows.read_buyers(connection, [head.tenant_id for head in heads])
        drafts = []
        for head in heads:
            draft, buyer = computed[head.id], buyers[head.tenant_id]
            if isinstance(draft, ComputedInvoice):
                drafts.append(draft.invoice)
            else:
                drafts.append(rows.uncomputable_draft(head, buyer, buyer.currency or self._currency, draft.message))
        return drafts

    async def compute_from_sums(
        self,
        connection: AsyncConnection,
        month: str,
        heads: Sequence[InvoiceHead],
        previous: Mapping[str, Coverage | None],
        sums: Mapping[str, Sequence[EventSums]],
    ) -> dict[str, ComputedInvoice | DraftUncomputable]:
        """Return the invoices of a month with the events in `sums`, or why one has no lines, by invoice id."""
        computed: dict[str, ComputedInvoice | DraftUncomputable] = {}
        tenant_ids = [head.tenant_id for head in heads]
        buyers = await rows.read_buyers(connection, tenant_ids)
        seller = {**(await read_record(connection, SELLER) or {}), TIME_ZONE: self._calendar.time_zone}
        used: dict[str, _Used] = {}
        for head in heads:
            try:
                used[head.tenant_id] = _used_of(sums[head.tenant_id], month, previous[head.tenant_id])
            except DraftUncomputable as error:
                if isinstance(error, InvoiceInconsistent):
                    _log.error("invoice_inconsistent", tenant_id=head.tenant_id, month=month, reason=error.message)
                computed[head.id] = error
        months = {tenant_id: {month, *(line.month for line in each.lines)} for tenant_id, each in used.items()}
        allowances = await rows.read_month_allowances(connection, months)
        for head in heads:
            if head.id in computed:
                continue
            each, buyer = used[head.tenant_id], buyers[head.tenant_id]
            lines = (*each.lines, *allowance_lines(each.lines, allowances[head.tenant_id]))
            currency = each.currency or buyer.currency or self._currency
            invoice = Invoice(
                head=head,
                currency=currency,
                lines=lines,
                totals=totals_of(lines, tax_basis_points=seller.get("tax_basis_points", 0), currency=currency),
                seller=seller,
                buyer={"name": buyer.name, **buyer.billing},
            )
            computed[head.id] = ComputedInvoice(invoice, each.first_open_month)
        return computed


@dataclass(frozen=True, slots=True)
class _Used:
    """The lines of an invoice before allowances, the currency of its costs (None: none), and `first_open_month`."""

    lines: Sequence[InvoiceLine]
    currency: str | None
    first_open_month: str | None


def _used_of(sums: Sequence[EventSums], month: str, previous: Coverage | None) -> _Used:
    """Compute the part of an invoice that depends only on its events. Raises DraftUncomputable."""
    first_open_month = _first_open_month(sums, month, previous)
    if first_open_month is not None:  # late events go to that month's invoice, not to this one
        sums = [group for group in sums if group.month == month]
    return _Used(usage_lines(sums, month), currency_of(sums, month), first_open_month)


async def read_sums_ahead(connection: AsyncConnection, month: str, tenant_ids: Collection[str]) -> SumsAhead:
    """Return the sums of all that is posted now for tenants up to `month` and on no invoice."""
    previous = await rows.read_last_coverages(connection, tenant_ids)
    coverage = Coverage(month, await last_taken(connection, POSTING))
    return SumsAhead(previous, coverage, await read_event_sums(connection, previous, coverage))


async def coverage_of(connection: AsyncConnection, head: InvoiceHead) -> tuple[Coverage, Coverage | None, date | None]:
    """Return (coverage, coverage of the preceding closed invoice, first billing day). The first billing day is that of the
    month for a draft that bills no late events, because an earlier month is still open; otherwise None."""
    tenant_id, month = head.tenant_id, head.month
    if head.through_posting is not None:
        coverages = await rows.read_last_coverages(connection, [tenant_id], before=month)
        return Coverage(month, head.through_posting), coverages[tenant_id], None
    ahead = await read_sums_ahead(connection, month, [tenant_id])
    previous = ahead.previous[tenant_id]
    is_next = _first_open_month(ahead.sums[tenant_id], month, previous) is None
    return ahead.coverage, previous, None if is_next else first_day(month)


async def complete_sums(
    connection: AsyncConnection, previous: Mapping[str, Coverage | None], through: int, ahead: SumsAhead
) -> dict[str, Sequence[EventSums]]:
    """Add the events posted since `ahead` was read; for tenants of whom another month was closed in between, read everything
    again. The tenants are those in `previous`, their last coverages now."""
    unchanged = {tenant_id for tenant_id, coverage in previous.items() if coverage == ahead.previous[tenant_id]}
    since = {tenant_id: ahead.coverage if tenant_id in unchanged else coverage for tenant_id, coverage in previous.items()}
    added = await read_event_sums(connection, since, Coverage(ahead.coverage.month, through))
    return {tenant_id: [*ahead.sums[tenant_id], *sums] if tenant_id in unchanged else sums for tenant_id, sums in added.items()}


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
