"""What must be true of closed invoices: lines match events, totals match lines, and the audit log agrees with each closing.

The log is hash-chained, so its record of a closing cannot be changed together with the invoice. Knows nothing of single events.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base import tables
from appliance.metering.invariants.finding import Finding, named
from appliance.metering.invoicing.free_allowances import FreeAllowance, allowance_in, read_allowances
from appliance.metering.invoicing.lines import (
    FREE_ALLOWANCE,
    InvoiceInconsistent,
    InvoiceLine,
    MonthAllowance,
    allowance_lines,
    totals_of,
    usage_lines,
)
from appliance.metering.invoicing.rows import InvoiceHead, closing_facts, head_from_row, read_lines
from appliance.metering.invoicing.sums import Coverage, read_event_sums

_NUMBERS = "invoice:"


@dataclass(slots=True)
class _Invoiced:
    """What the tenant's closed invoices so far cover, and what they billed and gave free for each month."""

    allowances: Sequence[FreeAllowance]
    cover: Coverage | None = None
    billed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    granted: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, head: InvoiceHead, lines: Sequence[InvoiceLine]) -> None:
        """Add one more invoice."""
        self.cover = Coverage(head.month, head.through_posting or 0)
        for line in lines:
            if line.kind == FREE_ALLOWANCE:
                self.granted[line.month] -= line.rounded_micros
            else:
                self.billed[line.month] += line.rounded_micros

    def free(self, month: str, lines: Sequence[InvoiceLine]) -> dict[str, MonthAllowance]:
        """Return the allowance of each month that an invoice of `month` bills."""
        return {
            of: MonthAllowance(
                monthly_micros=allowance_in(self.allowances, of),
                billed_micros=self.billed[of],
                granted_micros=self.granted[of],
            )
            for of in sorted({month, *(line.month for line in lines)})
            if self.allowances
        }


async def check(connection: AsyncConnection) -> Finding:
    """Return the finding on closed invoices."""
    invoices = tables.invoices
    query = select(invoices).where(invoices.c.state == "closed").order_by(invoices.c.tenant_id, invoices.c.month)
    heads = [head_from_row(row) for row in (await connection.execute(query)).mappings().all()]
    invoiced: dict[str, _Invoiced] = {}
    inexact, altered = [], []
    closings = await _closings(connection)
    for head in heads:
        if head.tenant_id not in invoiced:
            invoiced[head.tenant_id] = _Invoiced(await read_allowances(connection, head.tenant_id))
        so_far = invoiced[head.tenant_id]
        lines = (await read_lines(connection, [head.id]))[head.id]
        if not await _is_exact(connection, head, lines, so_far):
            inexact.append(str(head.number))
        if not _is_sum(head, lines) or closings.get(head.id) != closing_facts(head):
            altered.append(str(head.number))
        so_far.add(head, lines)
    if inexact:
        return Finding("invoices", "broken", named(inexact, "invoices are not the sum of their events"))
    if altered:
        return Finding("invoices", "broken", named(altered, "invoices differ from what they were when closed"))
    gone = sorted(closings.keys() - {head.id for head in heads})
    if gone:
        return Finding("invoices", "broken", named(gone, "closed invoices are missing"))
    gaps = await _number_gaps(connection, [str(head.number) for head in heads])
    if gaps:
        return Finding("invoices", "broken", f"numbers are missing: {', '.join(gaps)}")
    return Finding("invoices", "holds", f"{len(heads)} closed invoices, each the sum of its events, and as they were closed")


async def _is_exact(connection: AsyncConnection, head: InvoiceHead, stored: list[InvoiceLine], invoiced: _Invoiced) -> bool:
    """Return whether the stored lines are exactly those of the covered events, allowances included.

    After a downgrade, a version without batch work puts it on the lines of other work. Such an invoice must be exactly what
    that version would have written.
    """
    sums = await read_event_sums(connection, head.tenant_id, Coverage(head.month, head.through_posting or 0), invoiced.cover)
    as_one = [replace(group, batch=False) for group in sums]
    try:
        return any(
            _with_allowances(usage_lines(groups, head.month), head.month, invoiced) == stored for groups in (sums, as_one)
        )
    except InvoiceInconsistent:
        return False


def _with_allowances(used: list[InvoiceLine], month: str, invoiced: _Invoiced) -> list[InvoiceLine]:
    return [*used, *allowance_lines(used, invoiced.free(month, used))]


def _is_sum(head: InvoiceHead, lines: Sequence[InvoiceLine]) -> bool:
    """Return whether total and tax are those of the lines, at the seller's tax rate stored with the invoice."""
    tax_basis_points = (head.seller or {}).get("tax_basis_points", 0)
    totals = totals_of(lines, tax_basis_points=tax_basis_points, currency=head.currency)
    return (totals.total_micros, totals.tax_micros) == (head.total_micros, head.tax_micros)


async def _closings(connection: AsyncConnection) -> dict[str, dict[str, Any]]:
    """Return the audit log's record of each closing, by invoice id."""
    log = tables.audit_log.c
    query = select(log.target_id, log.after).where(log.action == "invoice.close").order_by(log.id)
    return {row.target_id: json.loads(row.after or "{}") for row in (await connection.execute(query)).all()}


async def _number_gaps(connection: AsyncConnection, numbers: list[str]) -> list[str]:
    """Return the years whose invoices are not numbered 1, 2, 3 … up to their counter."""
    used: dict[str, list[int]] = defaultdict(list)
    for number in numbers:
        year, _, place = number.partition("-")
        used[year].append(int(place))
    query = select(tables.counters.c.name, tables.counters.c.value).where(tables.counters.c.name.startswith(_NUMBERS))
    counted = {name.removeprefix(_NUMBERS): int(value) for name, value in (await connection.execute(query)).all()}
    return [
        year for year in sorted({*used, *counted}) if sorted(used.get(year, [])) != list(range(1, counted.get(year, 0) + 1))
    ]
