"""Cells of CSV files are escaped so that no spreadsheet reads them as formulas."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from appliance.base.spreadsheet import FORMULA_STARTS, escape_formulas
from appliance.cli.invoices import events_csv

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("start", FORMULA_STARTS)
def test_a_formula_is_prefixed_with_an_apostrophe(start: str) -> None:
    assert escape_formulas(f"{start}1+1") == f"'{start}1+1"


@pytest.mark.parametrize("start", FORMULA_STARTS)
def test_a_formula_after_a_semicolon_is_escaped(start: str) -> None:
    assert escape_formulas(f"Bob;{start}1+1;{start}2") == f"Bob;'{start}1+1;'{start}2"


def test_a_quoted_formula_after_a_semicolon_is_escaped() -> None:
    """Quotes are doubled in the file: split at semicolons, `""=1+1` is an empty quoted text followed by a formula."""
    assert escape_formulas('Bob;"=1+1;""=2') == """Bob;'"=1+1;'""=2"""


@pytest.mark.parametrize("text", ["", "demo", "1+1", "Bob; Söhne", "a;b=c", 'a;"b"', "a=b", "'=1", " =1"])
def test_other_text_is_unchanged(text: str) -> None:
    assert escape_formulas(text) == text


@pytest.mark.parametrize("start", FORMULA_STARTS)
def test_exported_events_have_no_formulas_and_unescaped_numbers(start: str) -> None:
    written = events_csv([{"model": f"{start}cmd", "cost_picos": -5}]).decode()
    heading, row = csv.reader(io.StringIO(written, newline=""))
    assert heading == ["model", "cost_picos"]
    assert row == [f"'{start}cmd", "-5"]


def test_formula_characters_are_defined_in_one_module() -> None:
    sources = [path for path in (REPO / "appliance").rglob("*.py") if '"=", "+", "-", "@"' in path.read_text("utf-8")]
    assert [path.name for path in sources] == ["spreadsheet.py"]
