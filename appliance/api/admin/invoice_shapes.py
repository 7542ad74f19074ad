"""The JSON of invoices, allowances and the seller, built from the types of metering."""

from __future__ import annotations

from typing import Any

import msgspec

from appliance.api.shapes import Shape
from appliance.metering.invoicing.lines import usage_picos
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
