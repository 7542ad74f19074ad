"""Texts and number formats of invoices."""

from __future__ import annotations

import dataclasses
from datetime import date

import pytest

from appliance.metering.invoicing.lines import ADJUSTMENT, FREE_ALLOWANCE, TOKEN_KINDS, InvoiceLine
from appliance.metering.invoicing.wording import (
    decimals_for,
    file_stem,
    format_day,
    format_payment,
    line_name,
    month_name,
    reasons_of,
    tax_name,
)


def line(kind: str, *, batch: bool = False) -> InvoiceLine:
    return InvoiceLine(
        model=None if kind == FREE_ALLOWANCE else "demo", kind=kind, batch=batch, month="2026-01", unit_price=None, tokens=1,
        requests=1, exact_picos=0, rounded_micros=0,
    )  # fmt: skip


def test_months_and_days_are_written_out() -> None:
    assert [month_name(f"2026-{month:02d}") for month in range(1, 13)] == [
        date(2026, month, 1).strftime("%B %Y") for month in range(1, 13)
    ]
    assert (month_name("2031-12"), format_day(date(2026, 2, 7))) == ("December 2031", "7 February 2026")


def test_each_kind_of_line_has_its_own_name() -> None:
    names = [line_name(line(kind)) for kind in (*TOKEN_KINDS, ADJUSTMENT, FREE_ALLOWANCE)]
    assert names == [
        "Prompt tokens", "Cached prompt tokens", "Output tokens", "Rejected draft tokens",
        "demo: corrections and late usage of January 2026", "Free allowance for January 2026",
    ]  # fmt: skip
    assert line_name(line("prompt", batch=True)) == "Prompt tokens, batch"


@pytest.mark.parametrize(
    ("seller", "name"),
    [
        ({"tax_basis_points": 1900, "tax_label": "VAT"}, "VAT 19 %"),
        ({"tax_basis_points": 775, "tax_label": None}, "Tax 7.75 %"),
        ({"tax_basis_points": 810, "tax_label": "VAT"}, "VAT 8.1 %"),
        ({"tax_basis_points": 10_000}, "Tax 100 %"),
        ({"tax_basis_points": 5}, "Tax 0.05 %"),
        ({"tax_basis_points": 1900, "tax_label": "19% MwSt."}, "19% MwSt."),
        ({}, "Tax 0 %"),
    ],
)
def test_a_tax_is_named_with_its_rate(seller: dict[str, object], name: str) -> None:
    assert tax_name(seller) == name


@pytest.mark.parametrize(
    ("amounts", "decimals"),
    [([], 2), ([5_000_000], 2), ([120_000, -10_000], 2), ([120_000, 1_000], 3), ([-100, 1_000], 4), ([10], 5), ([1, 10], 6)],
)
def test_amounts_are_written_with_as_many_decimals_as_they_need_and_at_least_two(amounts: list[int], decimals: int) -> None:
    assert decimals_for(amounts) == decimals


@pytest.mark.parametrize(
    ("micros", "currency", "text"),
    [
        (1_234_500_000, "EUR", "1,234.50 EUR"),
        (-10_000, "EUR", "-0.01 EUR"),
        (1_234_000_000, "JPY", "1,234 JPY"),
        (1_001_000, "KWD", "1.001 KWD"),
        (0, "EUR", "0.00 EUR"),
    ],
)
def test_a_payment_has_the_decimals_of_its_currency(micros: int, currency: str, text: str) -> None:
    assert format_payment(micros, currency) == text


@pytest.mark.parametrize(
    ("name", "closed", "draft"),
    [
        ("bob", "invoice-2026-0001-bob-2026-10", "draft-2026-10-bob-tn_1"),
        ('../Müller & Söhne "GmbH"\n', "invoice-2026-0001-muller-sohne-gmbh-2026-10", "draft-2026-10-muller-sohne-gmbh-tn_1"),
        ("株式会社", "invoice-2026-0001-tn_1-2026-10", "draft-2026-10-tn_1"),
        ("a" * 39 + " b", f"invoice-2026-0001-{'a' * 39}-2026-10", f"draft-2026-10-{'a' * 39}-tn_1"),
    ],
)
def test_a_file_is_named_after_number_tenant_and_month(name: str, closed: str, draft: str) -> None:
    assert file_stem("2026-0001", "2026-10", "tn_1", name) == closed
    assert file_stem(None, "2026-10", "tn_1", name) == draft


@pytest.mark.parametrize(("left_out", "last"), [(0, "wrong model"), (1, "1 other"), (2, "2 others"), (1234, "1,234 others")])
def test_reasons_that_are_left_out_are_counted_in_words(left_out: int, last: str) -> None:
    corrected = dataclasses.replace(line(ADJUSTMENT), reasons=("wrong model",), reasons_left_out=left_out)
    assert reasons_of(corrected)[-1] == last
