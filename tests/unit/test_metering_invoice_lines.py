"""Lines, allowances, currency and totals of an invoice, computed in integers from sums of events."""

from __future__ import annotations

import dataclasses

import pytest

from appliance.base.errors import CurrenciesMixed, InvoiceInconsistent
from appliance.base.money import format_exactly
from appliance.metering.invoicing.lines import (
    ADJUSTMENT,
    REASONS_MAX,
    EventSums,
    InvoiceLine,
    MonthAllowance,
    allowance_lines,
    currency_of,
    totals_of,
    usage_lines,
)

MONTH = "2026-10"
PRICES = (1_000_003, 100_003, 2_000_003, 300_003)


def used(prompt: int = 0, cached: int = 0, completion: int = 0, rejected: int = 0, *, currency: str = "EUR") -> EventSums:
    """Return the sums of one request of the month. `prompt` are the tokens that were not found in the cache."""
    tokens = (prompt, cached, completion, rejected)
    return EventSums(
        month=MONTH, model="demo", currency=currency, is_correction=False, unit_prices=PRICES, requests=1,
        kind_requests=(1, 1, 1, 1), prompt_tokens=prompt + cached, cached_tokens=cached, completion_tokens=completion,
        rejected_tokens=rejected, cost_picos=sum(count * price for count, price in zip(tokens, PRICES, strict=True)),
    )  # fmt: skip


def corrected(tokens: int, cost_picos: int, *, currency: str = "EUR") -> EventSums:
    """Return the sums of one correction."""
    return dataclasses.replace(
        used(currency=currency), is_correction=True, requests=0, completion_tokens=tokens, cost_picos=cost_picos
    )


def line(rounded_micros: int) -> InvoiceLine:
    """Return a line of the month with this amount."""
    return InvoiceLine(
        model="demo", kind=ADJUSTMENT, month=MONTH, unit_price=None, tokens=0, requests=0,
        exact_picos=rounded_micros * 10**6, rounded_micros=rounded_micros,
    )  # fmt: skip


def test_each_kind_of_token_has_a_line_at_its_own_price() -> None:
    lines = usage_lines([used(5, 7, 11, 13)], MONTH)
    assert [(line.kind, line.tokens, line.unit_price, line.exact_picos) for line in lines] == [
        ("prompt", 5, 1_000_003, 5_000_015),
        ("cached_prompt", 7, 100_003, 700_021),
        ("completion", 11, 2_000_003, 22_000_033),
        ("rejected_draft", 13, 300_003, 3_900_039),
    ]
    assert [line.rounded_micros for line in lines] == [5, 1, 22, 4]


@pytest.mark.parametrize("difference", [-1, 1])
def test_counts_that_do_not_add_up_to_the_cost_in_the_ledger_are_refused(difference: int) -> None:
    whole = used(5, 7, 11, 13)
    with pytest.raises(InvoiceInconsistent, match=format_exactly(whole.cost_picos, "EUR")):
        usage_lines([dataclasses.replace(whole, cost_picos=whole.cost_picos + difference)], MONTH)


@pytest.mark.parametrize(("tokens", "cost_picos", "num_lines"), [(3, 0, 1), (0, -3, 1), (3, -3, 1), (0, 0, 0)])
def test_a_correction_has_a_line_unless_it_is_zero(tokens: int, cost_picos: int, num_lines: int) -> None:
    lines = usage_lines([corrected(tokens, cost_picos)], MONTH)
    assert [(line.kind, line.tokens, line.exact_picos) for line in lines] == [(ADJUSTMENT, tokens, cost_picos)] * num_lines


def test_an_adjustment_has_the_distinct_reasons_of_its_corrections_in_the_order_of_posting() -> None:
    notes = [((7, "second"), (9, "third")), (), ((3, "first"), (9, "third\n= and\tits second line")), ((8, "second"),)]
    (line,) = usage_lines([dataclasses.replace(corrected(3, 5), notes=each) for each in notes], MONTH)
    assert line.reasons == ("first", "second", "third", "third = and its second line")
    assert line.reasons_left_out == 0


def test_an_adjustment_shows_a_limited_number_of_reasons_and_counts_the_others() -> None:
    notes = tuple((number, f"reason {number}") for number in range(REASONS_MAX + 3))
    (line,) = usage_lines([dataclasses.replace(corrected(3, 5), notes=notes)], MONTH)
    assert line.reasons == tuple(f"reason {number}" for number in range(REASONS_MAX))
    assert line.reasons_left_out == 3


_USD = [used(1, currency="USD"), corrected(0, -1_000_003, currency="USD")]  # adds up to zero
_YEN = [used(1, currency="JPY"), corrected(0, -1_000_003, currency="JPY")]


@pytest.mark.parametrize(
    ("sums", "currency", "num_lines"),
    [
        ([], None, 0),
        ([used(1)], "EUR", 1),
        ([corrected(3, 0)], None, 1),  # costs nothing in any currency
        (_USD, "USD", 2),
        ([used(1), *_USD], "EUR", 1),
        ([*_USD, *_YEN], None, 0),
        ([used(1), corrected(0, -1_000_002)], "EUR", 2),
    ],
)
def test_an_invoice_is_in_the_one_currency_in_which_something_is_owed(
    sums: list[EventSums], currency: str | None, num_lines: int
) -> None:
    assert currency_of(sums, MONTH) == currency
    assert len(usage_lines(sums, MONTH)) == num_lines


def test_amounts_owed_in_two_currencies_are_refused() -> None:
    with pytest.raises(CurrenciesMixed, match="EUR and USD"):
        currency_of([used(1, currency="USD"), used(1)], MONTH)


@pytest.mark.parametrize(
    ("allowance", "usage_micros", "deducted_micros"),
    [
        (MonthAllowance(monthly_micros=5), 3, -3),
        (MonthAllowance(monthly_micros=5), 5, -5),
        (MonthAllowance(monthly_micros=5), 7, -5),
        (MonthAllowance(monthly_micros=5, billed_micros=4, granted_micros=4), 3, -1),
        (MonthAllowance(monthly_micros=5, billed_micros=7, granted_micros=5), 3, None),
        (MonthAllowance(monthly_micros=5, billed_micros=4, granted_micros=4), -3, 3),  # a correction of what was free is free
        (MonthAllowance(monthly_micros=5, billed_micros=4, granted_micros=4), -9, 4),  # a month never costs less than nothing
        (MonthAllowance(monthly_micros=5), -1, None),
        (MonthAllowance(monthly_micros=0), 3, None),
    ],
)
def test_an_allowance_deducts_at_most_the_cost_of_the_month_and_its_own_amount(
    allowance: MonthAllowance, usage_micros: int, deducted_micros: int | None
) -> None:
    lines = allowance_lines([line(usage_micros), dataclasses.replace(line(100), month="2026-09")], {MONTH: allowance})
    found = [(line.month, line.tokens, line.requests, line.rounded_micros, line.exact_picos) for line in lines]
    assert found == ([] if deducted_micros is None else [(MONTH, 0, 0, deducted_micros, deducted_micros * 10**6)])


@pytest.mark.parametrize(
    ("subtotal", "basis_points", "currency", "net", "tax"),
    [
        (1_004_999, 1900, "EUR", 1_000_000, 190_000),
        (1_005_000, 1900, "EUR", 1_010_000, 190_000),  # 0.1919
        (1_005_000, 750, "EUR", 1_010_000, 80_000),  # 0.07575
        (1_000_000, 50, "EUR", 1_000_000, 10_000),  # a half is rounded up
        (-1_000_000, 50, "EUR", -1_000_000, -10_000),  # a refund is the negative of the same charge
        (-1_005_000, 1900, "EUR", -1_010_000, -190_000),
        (499_999, 1000, "XOF", 0, 0),
        (14_500_000, 1000, "JPY", 15_000_000, 2_000_000),
        (999_000, 5, "BHD", 999_000, 0),  # 0.0004995: not first to a micro-unit, and then to a coin
        (1_000_000, 5, "BHD", 1_000_000, 1_000),
        (12_350, 1900, "CLF", 12_400, 2_400),  # 0.0124 and 0.002356
    ],
)
def test_tax_is_computed_on_the_payable_amount_and_rounded_once(
    subtotal: int, basis_points: int, currency: str, net: int, tax: int
) -> None:
    totals = totals_of([line(subtotal - 1), line(1)], tax_basis_points=basis_points, currency=currency)
    assert (totals.subtotal_micros, totals.tax_micros, totals.due_micros) == (subtotal, tax, net + tax)
    assert (totals.total_micros, totals.rounding_micros) == (subtotal + tax, net - subtotal)
