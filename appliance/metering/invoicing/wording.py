"""Texts and number formats of an invoice, shared by PDF, console and command line."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from datetime import date
from typing import Any

from appliance.base.money import format_micros, minor_unit_decimals
from appliance.metering.invoicing.lines import ADJUSTMENT, FREE_ALLOWANCE, InvoiceLine

ABORT_POLICY = (
    "How usage is counted: the prompt of a request is billed once it has been read (prefill), output as it was generated, also "
    "when the request was aborted, disconnected, ran into a deadline or failed. A request that was refused, or that failed "
    "before its prompt was read, costs nothing. Tokens are those that the engine counted."
)
ROUNDING_POLICY = (
    "Costs are exact sums of tokens times price; each line is rounded once, half up, to a millionth of the currency."
)

FILE_NAME_CHARS_MAX = 40  # of the tenant's name

_KINDS = {
    "prompt": "Prompt tokens",
    "cached_prompt": "Cached prompt tokens",
    "completion": "Output tokens",
    "rejected_draft": "Rejected draft tokens",
}
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_DECIMALS_MIN, _DECIMALS_MAX = 2, 6


def month_name(month: str) -> str:
    """Format `2026-10` as October 2026."""
    return f"{_MONTHS[int(month[5:]) - 1]} {int(month[:4])}"


def format_day(day: date) -> str:
    """Format a date as 5 October 2026, so that day and month cannot be confused."""
    return f"{day.day} {_MONTHS[day.month - 1]} {day.year}"


def line_name(line: InvoiceLine) -> str:
    """Return the description of a line; a usage line's model is in the heading above it."""
    if line.kind == FREE_ALLOWANCE:
        return f"Free allowance for {month_name(line.month)}"
    if line.kind == ADJUSTMENT:
        return f"{line.model}: corrections and late usage of {month_name(line.month)}"
    return f"{_KINDS[line.kind]}, batch" if line.batch else _KINDS[line.kind]


def file_stem(number: str | None, month: str, tenant_id: str, tenant_name: str) -> str:
    """Return the name of an invoice's file, in ASCII, without its ending: `invoice-2026-0001-bob-2026-10`.

    That of a draft, which has no number, contains the tenant's id: several names of tenants may have the same ASCII form.
    """
    ascii_name = unicodedata.normalize("NFKD", tenant_name).encode("ascii", "ignore").decode().lower()
    tenant = re.sub("[^a-z0-9]+", "-", ascii_name)[:FILE_NAME_CHARS_MAX].strip("-")
    if number is None:
        return "-".join(filter(None, ("draft", month, tenant, tenant_id)))
    return f"invoice-{number}-{tenant or tenant_id}-{month}"


def reasons_of(line: InvoiceLine) -> list[str]:
    """Return the reasons of the corrections on a line, the last one in place of those left out: `3 others`."""
    left_out = line.reasons_left_out
    return [*line.reasons, *([f"{left_out:,} {'other' if left_out == 1 else 'others'}"] if left_out else [])]


def format_percent(basis_points: int) -> str:
    """Format 1900 as 19 %, 775 as 7.75 %."""
    return f"{basis_points // 100}{f'.{basis_points % 100:02d}'.rstrip('0').rstrip('.')} %"


def tax_name(seller: Mapping[str, Any]) -> str:
    """Return the seller's name for the tax, with the rate: VAT 19 %."""
    label = seller.get("tax_label") or "Tax"
    return label if "%" in label else f"{label} {format_percent(seller.get('tax_basis_points', 0))}"


def decimals_for(amounts: list[int]) -> int:
    """Return how many decimals, 2 to 6, are needed to write all `amounts` (micro-units) exactly."""
    for decimals in range(_DECIMALS_MIN, _DECIMALS_MAX):
        if all(amount % 10 ** (6 - decimals) == 0 for amount in amounts):
            return decimals
    return _DECIMALS_MAX


def format_payment(micros: int, currency: str) -> str:
    """Format a payable amount with the decimals of its currency: 1,234.50 EUR."""
    return f"{format_micros(micros, decimals=minor_unit_decimals(currency))} {currency}"
