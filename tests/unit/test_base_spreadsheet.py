"""No cell of a CSV file is a formula, in whichever file it stands."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from appliance.base.spreadsheet import FORMULA_STARTS, escape_formulas
from appliance.cli.invoices import events_csv

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("start", FORMULA_STARTS)
def test_a_formula_gets_an_apostrophe(start: str) -> None:
    assert escape_formulas(f"{start}1+1") == f"'{start}1+1"


@pytest.mark.parametrize("start", FORMULA_STARTS)
def test_a_formula_behind_a_semicolon_begins_a_cell_in_many_countries(start: str) -> None:
    assert escape_formulas(f"Bob;{start}1+1;{start}2") == f"Bob;'{start}1+1;'{start}2"


def test_a_formula_in_quotes_behind_a_semicolon_begins_a_cell_too() -> None:
    """A quote is doubled in the file: where semicolons divide it, `""=1+1` is an empty quoted text and what is behind it."""
    assert escape_formulas('Bob;"=1+1;""=2') == """Bob;'"=1+1;'""=2"""


@pytest.mark.parametrize("text", ["", "demo", "1+1", "Bob; Söhne", "a;b=c", 'a;"b"', "a=b", "'=1", " =1"])
def test_any_other_text_stays(text: str) -> None:
    assert escape_formulas(text) == text


@pytest.mark.parametrize("start", FORMULA_STARTS)
def test_exported_events_hold_no_formula_and_numbers_stay_numbers(start: str) -> None:
    written = events_csv([{"model": f"{start}cmd", "cost_picos": -5}]).decode()
    heading, row = csv.reader(io.StringIO(written, newline=""))
    assert heading == ["model", "cost_picos"]
    assert row == [f"'{start}cmd", "-5"]


def test_the_guard_is_written_once() -> None:
    sources = [path for path in (REPO / "appliance").rglob("*.py") if '"=", "+", "-", "@"' in path.read_text("utf-8")]
    assert [path.name for path in sources] == ["spreadsheet.py"]
