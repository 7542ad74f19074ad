"""An invoice as CSV: a row per line with its exact and its rounded amount, for spreadsheets and for checking the sums.

Only lines: the total, the parties and the explanation of how usage is counted are on the PDF and in the JSON. Programs that
read the file would take a sentence in a closing row, or in every row, for data.
"""

from __future__ import annotations

import csv
import io

from appliance.base.spreadsheet import escape_formulas
from appliance.metering.invoicing.rows import Invoice

COLUMNS = (
    "number", "tenant_id", "month", "line_month", "model", "kind", "tokens", "requests", "unit_price_micros", "exact_picos",
    "rounded_micros", "currency", "batch",
)  # fmt: skip


def render_csv(invoice: Invoice) -> bytes:
    """Return the lines as UTF-8 with a header row. There is no row for the total, which is the sum of `rounded_micros`."""
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
            )
        )
    return buffer.getvalue().encode()
