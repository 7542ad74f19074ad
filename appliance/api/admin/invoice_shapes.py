"""The JSON of invoices, allowances and the seller, built from the types of metering."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from appliance.api.error_responses import ErrorFields, error_fields
from appliance.api.shapes import Shape
from appliance.metering.invoicing.lines import usage_picos
from appliance.metering.invoicing.months import TenantResult
from appliance.metering.invoicing.rows import TIME_ZONE, Invoice, InvoiceHead
from appliance.metering.invoicing.wording import ABORT_POLICY


class InvoiceLineShape(Shape, kw_only=True):
    """A line of an invoice. Its exact amount, `exact_picos`, is rounded once, to `rounded_micros`."""

    model: str | None
    kind: str
    batch: bool
    month: str
    unit_price: int | None
    tokens: int
    requests: int
    exact_picos: int
    rounded_micros: int
    reasons: list[str]
    reasons_left_out: int


class InvoiceShape(Shape, kw_only=True):
    """An invoice with its lines. A closed invoice never changes; a draft shows what would be billed now."""

    id: str
    number: str | None
    tenant_id: str
    month: str
    state: str
    currency: str
    lines: list[InvoiceLineShape]
    subtotal_micros: int
    tax_micros: int
    total_micros: int
    rounding_micros: int
    due_micros: int
    usage_picos: int
    seller: dict[str, Any] | None
    buyer: dict[str, Any]
    time_zone: str
    through_posting: int | None
    created_at: str
    closed_at: str | None
    issued_on: str | None
    due_on: str | None
    abort_policy: str
    problem: str | None


class InvoiceHeadShape(Shape, kw_only=True):
    """An invoice without its lines. For a draft the sums and their currency are null; retrieve the draft to get them."""

    id: str
    number: str | None
    tenant_id: str
    month: str
    state: str
    currency: str | None
    total_micros: int | None
    tax_micros: int | None
    through_posting: int | None
    created_at: str
    closed_at: str | None


class TenantResultShape(msgspec.Struct, kw_only=True):
    """What became of the month of a tenant."""

    tenant_id: str
    result: str
    invoice: InvoiceShape | None
    error: ErrorFields | None


class MonthShape(msgspec.Struct, kw_only=True):
    """What became of a month. A tenant that fails does not stop the others."""

    data: list[TenantResultShape]
    num_done: int
    num_skipped: int
    num_failed: int


class AllowanceShape(Shape, kw_only=True):
    """An amount that is free for a tenant each month, from `first_month` until a later allowance replaces it."""

    id: str
    tenant_id: str
    first_month: str
    monthly_micros: int
    created_at: str


class SellerShape(msgspec.Struct, kw_only=True):
    """The seller named on invoices."""

    name: str
    address: list[str]
    email: str | None
    phone: str | None
    website: str | None
    tax_id: str | None
    registration: str | None
    bank: list[str]
    payment_terms_days: int
    payment_note: str | None
    tax_basis_points: int
    tax_label: str | None
    tax_note: str | None


def invoice_shape(invoice: Invoice) -> InvoiceShape:
    """Return an invoice with its lines as JSON."""
    head, totals = invoice.head, invoice.totals
    seller = {name: value for name, value in invoice.seller.items() if name != TIME_ZONE}
    return InvoiceShape.of(
        head,
        currency=invoice.currency,
        lines=[InvoiceLineShape.of(line) for line in invoice.lines],
        subtotal_micros=totals.subtotal_micros,
        tax_micros=totals.tax_micros,
        total_micros=totals.total_micros,
        rounding_micros=totals.rounding_micros,
        due_micros=totals.due_micros,
        usage_picos=usage_picos(invoice.lines),
        seller=seller or None,
        buyer=dict(invoice.buyer),
        time_zone=invoice.seller.get(TIME_ZONE, "UTC"),
        issued_on=invoice.issued_on,
        due_on=invoice.due_on,
        abort_policy=ABORT_POLICY,
        problem=invoice.problem,
    )


def invoice_head_shape(head: InvoiceHead) -> InvoiceHeadShape:
    """Return an invoice without its lines as JSON."""
    unknown = dict.fromkeys(("currency", "total_micros", "tax_micros")) if head.state == "draft" else {}
    return InvoiceHeadShape.of(head, **unknown)


async def month_shape(portions: AsyncIterator[list[TenantResult]]) -> MonthShape:
    """Do the work of a month and return its results as JSON."""
    data, counts = [], Counter[str]()
    async for portion in portions:
        for tenant in portion:
            counts[tenant.result] += 1
            data.append(
                TenantResultShape(
                    tenant_id=tenant.tenant_id,
                    result=tenant.result,
                    invoice=None if tenant.invoice is None else invoice_shape(tenant.invoice),
                    error=None if tenant.error is None else error_fields(tenant.error),
                )
            )
    skipped, failed = counts["skipped"], counts["failed"]
    return MonthShape(data=data, num_done=len(data) - skipped - failed, num_skipped=skipped, num_failed=failed)
