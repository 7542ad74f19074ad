"""Checks closed invoices: lines match events, totals match lines, and the audit log has the same figures of each closing.

The audit log is hash-chained, so its record of a closing cannot be altered along with the invoice.
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
from appliance.base.errors import InvoiceInconsistent
from appliance.base.texts import counted
from appliance.metering.invariants.finding import Finding, list_ids
from appliance.metering.invoicing.free_allowances import FreeAllowance, allowance_in, read_allowances
from appliance.metering.invoicing.lines import (
    FREE_ALLOWANCE,
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
class _Earlier:
    """Coverage of the tenant's earlier invoices, and what they billed and granted by month."""

    allowances: Sequence[FreeAllowance]
    coverage: Coverage | None = None
    billed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    granted: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, head: InvoiceHead, lines: Sequence[InvoiceLine]) -> None:
        """Add the next closed invoice."""
        self.coverage = Coverage(head.month, head.through_posting or 0)
        for line in lines:
            if line.kind == FREE_ALLOWANCE:
                self.granted[line.month] -= line.rounded_micros
            else:
                self.billed[line.month] += line.rounded_micros

    def allowances_for(self, month: str, lines: Sequence[InvoiceLine]) -> dict[str, MonthAllowance]:
        """Return the allowance of each month on an invoice of `month` with these `lines`."""
        return {
            billed_month: MonthAllowance(
                monthly_micros=allowance_in(self.allowances, billed_month),
                billed_micros=self.billed[billed_month],
                granted_micros=self.granted[billed_month],
            )
            for billed_month in sorted({month, *(line.month for line in lines)})
            if self.allowances
        }


async def check(connection: AsyncConnection) -> Finding:
    """Return the finding for all closed invoices."""
    invoices = tables.invoices
    query = select(invoices).where(invoices.c.state == "closed").order_by(invoices.c.tenant_id, invoices.c.month)
    heads = [head_from_row(row) for row in (await connection.execute(query)).mappings().all()]
    by_tenant: dict[str, _Earlier] = {}
    inexact, altered = [], []
    closings = await _read_closings(connection)
    for head in heads:
        if head.tenant_id not in by_tenant:
            allowances = await read_allowances(connection, [head.tenant_id])
            by_tenant[head.tenant_id] = _Earlier(allowances[head.tenant_id])
        earlier = by_tenant[head.tenant_id]
        lines = (await read_lines(connection, [head.id]))[head.id]
        if not await _lines_match_events(connection, head, lines, earlier):
            inexact.append(str(head.number))
        if not _totals_match_lines(head, lines) or closings.get(head.id) != closing_facts(head):
            altered.append(str(head.number))
        earlier.add(head, lines)
    if inexact:
        return Finding("invoices", "broken", list_ids(inexact, "invoices that are not the sum of their events"))
    if altered:
        return Finding("invoices", "broken", list_ids(altered, "invoices altered after closing"))
    missing = sorted(closings.keys() - {head.id for head in heads})
    if missing:
        return Finding("invoices", "broken", list_ids(missing, "missing closed invoices"))
    gaps = await _number_gaps(connection, [str(head.number) for head in heads])
    if gaps:
        return Finding("invoices", "broken", f"numbers are missing: {', '.join(gaps)}")
    return Finding(
        "invoices", "holds", f"{counted(len(heads), 'closed invoice')}, each the sum of its events and unaltered since closing"
    )


async def _lines_match_events(
    connection: AsyncConnection, head: InvoiceHead, stored: list[InvoiceLine], earlier: _Earlier
) -> bool:
    """Return whether the stored lines are exactly those computed from the covered events, including allowances.

    After a downgrade, a version that does not know batch work bills it on the lines of other work. Lines as that version would
    write them are accepted too, and so are lines without reasons, which earlier versions did not store.
    """
    coverage = Coverage(head.month, head.through_posting or 0)
    sums = (await read_event_sums(connection, {head.tenant_id: earlier.coverage}, coverage))[head.tenant_id]
    without_batch = [replace(group, batch=False) for group in sums]
    try:
        return any(
            _are_same(_with_allowances(usage_lines(groups, head.month), head.month, earlier), stored)
            for groups in (sums, without_batch)
        )
    except InvoiceInconsistent:
        return False


def _are_same(computed: Sequence[InvoiceLine], stored: Sequence[InvoiceLine]) -> bool:
    if any(line.reasons for line in stored):
        return computed == stored
    return [replace(line, reasons=(), reasons_left_out=0) for line in computed] == stored


def _with_allowances(used: list[InvoiceLine], month: str, earlier: _Earlier) -> list[InvoiceLine]:
    return [*used, *allowance_lines(used, earlier.allowances_for(month, used))]


def _totals_match_lines(head: InvoiceHead, lines: Sequence[InvoiceLine]) -> bool:
    """Return whether total and tax follow from the lines and the tax rate stored with the invoice."""
    tax_basis_points = (head.seller or {}).get("tax_basis_points", 0)
    totals = totals_of(lines, tax_basis_points=tax_basis_points, currency=head.currency)
    return (totals.total_micros, totals.tax_micros) == (head.total_micros, head.tax_micros)


async def _read_closings(connection: AsyncConnection) -> dict[str, dict[str, Any]]:
    """Return the audit log's record of each closing, by invoice id."""
    log = tables.audit_log.c
    query = select(log.target_id, log.after).where(log.action == "invoice.close").order_by(log.id)
    return {row.target_id: json.loads(row.after or "{}") for row in (await connection.execute(query)).all()}


async def _number_gaps(connection: AsyncConnection, numbers: list[str]) -> list[str]:
    """Return the years whose invoices are not numbered 1, 2, 3 … up to their counter."""
    used: dict[str, list[int]] = defaultdict(list)
    for number in numbers:
        year, _, index = number.partition("-")
        used[year].append(int(index))
    query = select(tables.counters.c.name, tables.counters.c.value).where(tables.counters.c.name.startswith(_NUMBERS))
    counted = {name.removeprefix(_NUMBERS): int(value) for name, value in (await connection.execute(query)).all()}
    return [
        year for year in sorted({*used, *counted}) if sorted(used.get(year, [])) != list(range(1, counted.get(year, 0) + 1))
    ]
