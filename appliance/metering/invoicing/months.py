"""Drafts or closes a month for many tenants, with a result for each one. Skipped are those with nothing to do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from appliance.base.batches import batched
from appliance.base.errors import GatehouseError, InvoiceClosed, MonthOutOfOrder, NothingToBill
from appliance.metering.invoicing.invoices import PORTION_TENANTS, Invoices
from appliance.metering.invoicing.portions import BILLABLE, CLOSABLE, Expected
from appliance.metering.invoicing.rows import Invoice
from appliance.tenancy.access import Access

NOTHING_TO_DO = (InvoiceClosed, NothingToBill, MonthOutOfOrder)  # the last: the tenant has a later month that is closed


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantResult:
    """What became of a tenant's month: `drafted` or `closed`, with its invoice; `skipped` or `failed`, with the reason."""

    tenant_id: str
    result: str
    invoice: Invoice | None = None
    error: GatehouseError | None = None


async def draft_month(
    invoices: Invoices, tenant_ids: Sequence[str], month: str, *, access: Access
) -> AsyncIterator[list[TenantResult]]:
    """Draft a month for tenants that have something to bill, and yield the results in their order, a few at a time.

    Raises the errors of `Invoices.draft_each` before anything is stored.
    """
    invoices.check_draft(tenant_ids, month, BILLABLE, access)
    for portion in batched(tenant_ids, PORTION_TENANTS):
        drafted = await invoices.draft_each(portion, month, only=BILLABLE, access=access)
        yield [_drafted(tenant_id, drafted[tenant_id]) for tenant_id in portion]


async def close_month(
    invoices: Invoices, tenant_ids: Sequence[str], month: str, *, access: Access
) -> AsyncIterator[list[TenantResult]]:
    """Draft and close a month that is over for tenants that have something to bill, and yield the results in their order, a
    few at a time. Invoices are numbered in this order.

    A tenant with an earlier month to close first fails, and gets no draft. Raises the errors of `Invoices.draft_each` before
    anything is stored.
    """
    invoices.check_draft(tenant_ids, month, CLOSABLE, access)
    for portion in batched(tenant_ids, PORTION_TENANTS):
        drafted = await invoices.draft_each(portion, month, only=CLOSABLE, access=access)
        results = {tenant_id: _drafted(tenant_id, drafted[tenant_id]) for tenant_id in portion}
        drafts = {each.invoice.head.id: tenant_id for tenant_id, each in results.items() if each.invoice is not None}
        for invoice_id, outcome in (await invoices.close_each(dict.fromkeys(drafts, Expected()), access=access)).items():
            results[drafts[invoice_id]] = _closed(drafts[invoice_id], outcome)
        yield list(results.values())


def _drafted(tenant_id: str, outcome: Invoice | GatehouseError) -> TenantResult:
    if isinstance(outcome, Invoice):
        return TenantResult(tenant_id=tenant_id, result="drafted", invoice=outcome)
    return TenantResult(
        tenant_id=tenant_id, result="skipped" if isinstance(outcome, NOTHING_TO_DO) else "failed", error=outcome
    )


def _closed(tenant_id: str, outcome: Invoice | GatehouseError) -> TenantResult:
    if isinstance(outcome, Invoice):
        return TenantResult(tenant_id=tenant_id, result="closed", invoice=outcome)
    closed_meanwhile = isinstance(outcome, InvoiceClosed)
    return TenantResult(tenant_id=tenant_id, result="skipped" if closed_meanwhile else "failed", error=outcome)
