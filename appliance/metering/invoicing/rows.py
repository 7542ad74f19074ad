"""Reads and writes the tables of invoices and their lines. Contains no rules about money, order or time."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from hashlib import sha256
from typing import Any, Literal, get_args

from sqlalchemy import ColumnElement, RowMapping, and_, bindparam, delete, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.tables import invoice_lines, invoices, tenants
from appliance.metering.calendar import BillingCalendar
from appliance.metering.invoicing.free_allowances import allowance_in, read_allowances
from appliance.metering.invoicing.lines import FREE_ALLOWANCE, InvoiceLine, InvoiceTotals, MonthAllowance, totals_of
from appliance.metering.invoicing.seller import TERMS_DAYS_DEFAULT
from appliance.metering.invoicing.sums import Coverage
from appliance.tenancy.access import Access
from appliance.tenancy.pages import Page, check_limit, decode_cursor, page_of
from appliance.tenancy.roles import Action

# draft -> closed, once, by a conditional UPDATE on state. A draft stores only its tenant and month.
State = Literal["draft", "closed"]
STATES: tuple[str, ...] = get_args(State)
TOTAL_MICROS_MAX = 2**63 - 1  # of the column
TIME_ZONE = "time_zone"  # stored among the seller's fields: the zone of the invoice's dates

_LINE_FIELDS = ("model", "kind", "batch", "month", "unit_price", "tokens", "requests", "rounded_micros")
_NO_REASONS: Mapping[str, Any] = {"texts": (), "left_out": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class InvoiceHead:
    """An invoice without its lines. A draft has no totals, seller or buyer here, and the currency that its tenant had when the
    draft was created: they are computed on demand."""

    id: str
    tenant_id: str
    month: str
    number: str | None
    state: State
    currency: str
    total_micros: int
    tax_micros: int
    through_posting: int | None
    seller: Mapping[str, Any] | None
    buyer: Mapping[str, Any] | None
    created_at: datetime
    closed_at: datetime | None

    @property
    def issued_on(self) -> date | None:
        """Return the date of closing in the billing time zone of that time; None for a draft."""
        zone = (self.seller or {}).get(TIME_ZONE, "UTC")
        return None if self.closed_at is None else BillingCalendar(zone).day_of(self.closed_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Invoice:
    """An invoice with its lines: as stored if closed, as computed now if a draft.

    `problem` says why a draft cannot be computed; it then has neither lines nor totals.
    """

    head: InvoiceHead
    currency: str
    lines: tuple[InvoiceLine, ...]
    totals: InvoiceTotals
    seller: Mapping[str, Any]
    buyer: Mapping[str, Any]
    problem: str | None = None

    @property
    def is_draft(self) -> bool:
        """Return whether the invoice can still change."""
        return self.head.state == "draft"

    @property
    def issued_on(self) -> date | None:
        """Return the date of the invoice; None for a draft."""
        return self.head.issued_on

    @property
    def due_on(self) -> date | None:
        """Return the due date; None for a draft, and for an invoice with nothing to pay or a credit note."""
        if self.issued_on is None or self.totals.due_micros <= 0:
            return None
        return self.issued_on + timedelta(days=self.seller.get("payment_terms_days", TERMS_DAYS_DEFAULT))

    def closed(self, number: str, *, through_posting: int, at: datetime) -> Invoice:
        """Return this draft as the closed invoice with `number`."""
        head = dataclasses.replace(
            self.head,
            number=number,
            state="closed",
            currency=self.currency,
            total_micros=self.totals.total_micros,
            tax_micros=self.totals.tax_micros,
            through_posting=through_posting,
            seller=self.seller,
            buyer=self.buyer,
            closed_at=at,
        )
        return dataclasses.replace(self, head=head)

    def alert_data(self, tenant_name: str) -> dict[str, Any]:
        """Return the data of the `invoice.closed` alert. The tenant has its own name, as in other alerts, not the buyer's."""
        return {
            "tenant_id": self.head.tenant_id,
            "tenant_name": tenant_name,
            "invoice_id": self.head.id,
            "number": self.head.number,
            "month": self.head.month,
            "total_micros": self.head.total_micros,
            "tax_micros": self.head.tax_micros,
            "due_micros": self.totals.due_micros,
            "currency": self.head.currency,
        }


def closing_facts(head: InvoiceHead) -> dict[str, Any]:
    """Return what the audit log records about a closing: the totals, and a digest of seller and buyer."""
    names = ("number", "month", "state", "currency", "total_micros", "tax_micros", "through_posting")
    parties = json.dumps([head.seller, head.buyer], sort_keys=True, ensure_ascii=True)
    return {name: getattr(head, name) for name in names} | {"parties_sha256": sha256(parties.encode()).hexdigest()}


@dataclass(frozen=True, slots=True)
class Buyer:
    """The tenant as named on invoices."""

    name: str
    currency: str | None
    billing: Mapping[str, Any]


def closed_invoice(head: InvoiceHead, lines: Sequence[InvoiceLine]) -> Invoice:
    """Build a closed invoice from its stored values."""
    totals = totals_of(lines, tax_basis_points=0, currency=head.currency)
    return Invoice(
        head=head,
        currency=head.currency,
        lines=tuple(lines),
        totals=dataclasses.replace(totals, tax_micros=head.tax_micros, due_micros=totals.due_micros + head.tax_micros),
        seller=head.seller or {},
        buyer=head.buyer or {"name": head.tenant_id},
    )


def uncomputable_draft(head: InvoiceHead, buyer: Buyer, currency: str, problem: str) -> Invoice:
    """Build the list entry of a draft that cannot be computed, with sums of zero in `currency`."""
    zero = InvoiceTotals(subtotal_micros=0, tax_micros=0, due_micros=0)
    return Invoice(head=head, currency=currency, lines=(), totals=zero, seller={}, buyer={"name": buyer.name}, problem=problem)


async def read_heads(connection: AsyncConnection, invoice_ids: Collection[str]) -> dict[str, InvoiceHead]:
    """Return the invoices with these ids that exist, by id."""
    return {head.id: head for head in await _read(connection, invoices.c.id.in_(invoice_ids))}


async def read_month(connection: AsyncConnection, tenant_ids: Collection[str], month: str) -> dict[str, InvoiceHead]:
    """Return the invoices of tenants and a month that exist, by tenant id."""
    of_month = await _read(connection, invoices.c.tenant_id.in_(tenant_ids), invoices.c.month == month)
    return {head.tenant_id: head for head in of_month}


async def read_page(
    connection: AsyncConnection, limit: int, cursor: str | None, access: Access, **filters: str | None
) -> Page[InvoiceHead]:
    """Return the invoices that `access` may see and whose columns equal `filters` (None: any value), newest month first."""
    columns = invoices.c
    query = select(invoices).where(*(columns[name] == value for name, value in filters.items() if value is not None))
    query = access.narrow(query, columns.tenant_id, Action.INVOICES).order_by(columns.month.desc(), columns.id.desc())
    if cursor is not None:
        last_month, last_id = decode_cursor("invoices", cursor, [str, str])
        query = query.where(or_(columns.month < last_month, and_(columns.month == last_month, columns.id < last_id)))
    found = (await connection.execute(query.limit(check_limit(limit) + 1))).mappings().all()
    return page_of([head_from_row(row) for row in found], limit, "invoices", lambda head: [head.month, head.id])


async def read_last_coverages(
    connection: AsyncConnection, tenant_ids: Collection[str], *, before: str | None = None
) -> dict[str, Coverage | None]:
    """Return the coverage of each tenant's last closed invoice, or of the last one of a month before `before`; None if none."""
    columns = invoices.c
    query = (
        # Months are closed in order and postings only grow: the last month has the last posting.
        select(columns.tenant_id, func.max(columns.month).label("month"), func.max(columns.through_posting).label("posting"))
        .where(columns.tenant_id.in_(tenant_ids), columns.state == "closed")
        .group_by(columns.tenant_id)
    )
    if before is not None:
        query = query.where(columns.month < before)
    found: dict[str, Coverage | None] = dict.fromkeys(tenant_ids)
    for row in (await connection.execute(query)).all():
        found[row.tenant_id] = Coverage(row.month, row.posting)
    return found


async def read_lines(connection: AsyncConnection, invoice_ids: Sequence[str]) -> dict[str, list[InvoiceLine]]:
    """Return the lines of closed invoices by invoice id, in line order."""
    columns = invoice_lines.c
    query = select(invoice_lines).where(columns.invoice_id.in_(invoice_ids)).order_by(columns.invoice_id, columns.position)
    found: dict[str, list[InvoiceLine]] = {invoice_id: [] for invoice_id in invoice_ids}
    for row in (await connection.execute(query)).mappings():
        fields = {name: row[name] for name in _LINE_FIELDS}
        reasons = row["reasons"] or _NO_REASONS
        found[row["invoice_id"]].append(
            InvoiceLine(
                **fields,
                exact_picos=int(row["exact_picos"]),
                reasons=tuple(reasons["texts"]),
                reasons_left_out=reasons["left_out"],
            )
        )
    return found


async def read_month_allowances(
    connection: AsyncConnection, months: Mapping[str, Collection[str]]
) -> dict[str, dict[str, MonthAllowance]]:
    """Return the allowance of each of the `months` of a tenant, with what the tenant's closed invoices have billed and granted
    for that month, by tenant id and month; empty for a tenant without an allowance."""
    allowances = {tenant_id: rows for tenant_id, rows in (await read_allowances(connection, months)).items() if rows}
    if not allowances:
        return {tenant_id: {} for tenant_id in months}
    lines = invoice_lines.c
    is_free = (lines.kind == FREE_ALLOWANCE).label("is_free")
    groups = (invoices.c.tenant_id, lines.month, is_free)
    any_month = {month for tenant_id in allowances for month in months[tenant_id]}
    query = (
        select(*groups, func.sum(lines.rounded_micros).label("micros"))
        .join_from(invoice_lines, invoices, invoices.c.id == lines.invoice_id)
        .where(invoices.c.tenant_id.in_(allowances), lines.month.in_(any_month))
        .group_by(*groups)
    )
    found = (await connection.execute(query)).all()
    sums = {(row.tenant_id, row.month, bool(row.is_free)): int(row.micros) for row in found}
    return {
        tenant_id: {
            month: MonthAllowance(
                monthly_micros=allowance_in(allowances[tenant_id], month),
                billed_micros=sums.get((tenant_id, month, False), 0),
                granted_micros=-sums.get((tenant_id, month, True), 0),
            )
            for month in of_tenant
            if tenant_id in allowances
        }
        for tenant_id, of_tenant in months.items()
    }


async def read_buyers(connection: AsyncConnection, tenant_ids: Collection[str]) -> dict[str, Buyer]:
    """Return the tenants that exist as named on invoices, by id, from the snapshot that their usage is read from."""
    columns = tenants.c
    query = select(columns.id, columns.name, columns.currency, columns.billing).where(columns.id.in_(tenant_ids))
    return {row.id: Buyer(row.name, row.currency, row.billing or {}) for row in (await connection.execute(query)).all()}


async def insert_drafts(connection: AsyncConnection, heads: Sequence[InvoiceHead]) -> None:
    """Insert new drafts."""
    await connection.execute(insert(invoices), [_columns(head) for head in heads])


async def delete_drafts(connection: AsyncConnection, invoice_ids: Collection[str]) -> None:
    """Delete drafts."""
    await connection.execute(delete(invoices).where(invoices.c.id.in_(invoice_ids), invoices.c.state == "draft"))


async def read_earlier_drafts(connection: AsyncConnection, tenant_ids: Collection[str], month: str) -> list[InvoiceHead]:
    """Return the drafts of tenants for months before `month`, by tenant and month."""
    columns = invoices.c
    found = await _read(connection, columns.tenant_id.in_(tenant_ids), columns.state == "draft", columns.month < month)
    return sorted(found, key=lambda head: (head.tenant_id, head.month))


async def store_closed(connection: AsyncConnection, closed: Sequence[Invoice]) -> None:
    """Turn drafts into closed invoices and insert their lines. Call it with the posting counter locked."""
    change = update(invoices).where(invoices.c.id == bindparam("draft_id"), invoices.c.state == "draft")
    columns = [_columns(invoice.head) for invoice in closed]
    changed = await connection.execute(change, [{"draft_id": head.pop("id"), **head} for head in columns])
    assert changed.rowcount == len(closed), "no draft is closed while the posting counter is locked"
    lines = [_line_row(invoice.head.id, *item) for invoice in closed for item in enumerate(invoice.lines, 1)]
    if lines:
        await connection.execute(insert(invoice_lines), lines)


def head_from_row(row: RowMapping) -> InvoiceHead:
    """Convert a row of `invoices`."""
    return InvoiceHead(**{name: row[name] for name in invoices.c.keys()})  # noqa: SIM118 - of columns, not of a mapping


async def _read(connection: AsyncConnection, *conditions: ColumnElement[bool]) -> list[InvoiceHead]:
    return [head_from_row(row) for row in (await connection.execute(select(invoices).where(*conditions))).mappings()]


def _columns(head: InvoiceHead) -> dict[str, Any]:
    return {name: getattr(head, name) for name in invoices.c.keys()}  # noqa: SIM118 - of columns, not of a mapping


def _line_row(invoice_id: str, position: int, line: InvoiceLine) -> dict[str, Any]:
    fields = {name: getattr(line, name) for name in _LINE_FIELDS}
    reasons = {"texts": list(line.reasons), "left_out": line.reasons_left_out} if line.reasons else None
    return fields | {
        "invoice_id": invoice_id,
        "position": position,
        "exact_picos": str(line.exact_picos),
        "reasons": reasons,
    }
