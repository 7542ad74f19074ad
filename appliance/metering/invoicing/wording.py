"""The wording of an invoice, the same for PDF, CSV and console: names of kinds and months, and formats of amounts."""

from __future__ import annotations

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

_KINDS = {
    "prompt": "Prompt tokens",
    "cached_prompt": "Cached prompt tokens",
    "completion": "Completion tokens",
    "rejected_draft": "Rejected speculative tokens",
}
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_DECIMALS_MIN, _DECIMALS_MAX = 2, 6


def month_name(month: str) -> str:
    """Return `2026-10` as October 2026."""
    return f"{_MONTHS[int(month[5:]) - 1]} {int(month[:4])}"


def day_name(day: date) -> str:
    """Return a day as 5 October 2026, so that day and month cannot be confused."""
    return f"{day.day} {_MONTHS[day.month - 1]} {day.year}"


def line_name(line: InvoiceLine) -> str:
    """Return what a line is for; the model of a usage line is in the heading over it."""
    if line.kind == FREE_ALLOWANCE:
        return f"Free allowance for {month_name(line.month)}"
    if line.kind == ADJUSTMENT:
        return f"{line.model}: corrections and late usage of {month_name(line.month)}"
    return f"{_KINDS[line.kind]}, batch" if line.batch else _KINDS[line.kind]


def percent(basis_points: int) -> str:
    """Return 1900 as 19 %, 775 as 7.75 %."""
    return f"{basis_points // 100}{f'.{basis_points % 100:02d}'.rstrip('0').rstrip('.')} %"


def tax_name(seller: Mapping[str, Any]) -> str:
    """Return the tax as the seller calls it, with its rate: VAT 19 %."""
    label = seller.get("tax_label") or "Tax"
    return label if "%" in label else f"{label} {percent(seller.get('tax_basis_points', 0))}"


def decimals_for(amounts: list[int]) -> int:
    """Return how many decimals, 2 to 6, all these micro-units need to be written exactly."""
    for decimals in range(_DECIMALS_MIN, _DECIMALS_MAX):
        if all(amount % 10 ** (6 - decimals) == 0 for amount in amounts):
            return decimals
    return _DECIMALS_MAX


def payment(micros: int, currency: str) -> str:
    """Return a payable amount with the decimals of its currency: 1,234.50 EUR."""
    return f"{format_micros(micros, decimals=minor_unit_decimals(currency))} {currency}"
