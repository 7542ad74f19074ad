"""Renders an invoice as CSV: one row per line, with exact and rounded amounts, for spreadsheets and for checking the sums.

Contains only lines: programs that read the file would take a footer for data. The total, the parties and the explanation of
how usage is counted are on the PDF and in the JSON.
"""

from __future__ import annotations

import csv
import io

from appliance.base.spreadsheet import escape_formulas
from appliance.metering.invoicing.rows import Invoice
from appliance.metering.invoicing.wording import reasons_of

COLUMNS = (
    "number", "tenant_id", "month", "line_month", "model", "kind", "tokens", "requests", "unit_price", "exact_picos",
    "rounded_micros", "currency", "batch", "reasons",
)  # fmt: skip


def render_csv(invoice: Invoice) -> bytes:
    """Return the lines as UTF-8 with a header row and no total row; the total is the sum of `rounded_micros`."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\r\n")
    writer.writerow(COLUMNS)
    head = invoice.head
    for line in invoice.lines:
        writer.writerow(
            (
                head.number or "",
                head.tenant_id,
                head.month,
                line.month,
                escape_formulas(line.model or ""),
                line.kind,
                line.tokens,
                line.requests,
                "" if line.unit_price is None else line.unit_price,
                line.exact_picos,
                line.rounded_micros,
                invoice.currency,
                "yes" if line.batch else "no",
                " | ".join(escape_formulas(reason) for reason in reasons_of(line)),
            )
        )
    return buffer.getvalue().encode()
