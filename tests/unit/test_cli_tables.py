"""Tables on a terminal: nothing is truncated, least of all ids that the next command needs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from appliance.cli import output

ID, TENANT_ID = "key_01m872hbrg3tvkwc3pq4ey350a", "tn_01m872hbr9ay729zk7kp174jjy"
KEYS = [
    {
        "id": ID,
        "tenant_id": TENANT_ID,
        "name": "the nightly report of the finance department",
        "created_at": "2026-11-24T15:24:37.008Z",
        "note": None,
    }
]
COLUMNS = ("id", "tenant_id", "name", "created_at", "note")


class Terminal:
    """Prints tables to a terminal of a given width and returns the text without colours."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def render(self, rows: list[dict[str, Any]], width: int) -> str:
        self._monkeypatch.setenv("COLUMNS", str(width))
        self._monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        output.table(rows, COLUMNS, empty="none")
        return re.sub(r"\x1b\[[0-9;]*m", "", self._capsys.readouterr().out)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(monkeypatch, capsys)


@pytest.mark.parametrize("width", [40, 80, 100, 120, 200])
def test_nothing_is_truncated_at_any_width(terminal: Terminal, width: int) -> None:
    shown = terminal.render(KEYS, width)

    assert ID in shown
    assert TENANT_ID in shown
    assert "…" not in shown
    assert {"nightly", "finance"} <= set(shown.split())
    assert re.search(r"2026-11-24[ T]15:24:37|2026-11-24 .*\n.* 15:24:37Z", shown)


def test_rows_that_fit_the_width_are_printed_as_a_table(terminal: Terminal) -> None:
    head, row = terminal.render(KEYS, 160).splitlines()

    assert head.split() == ["id", "tenant", "id", "name", "created", "at", "note"]
    assert row.split()[0] == ID


def test_rows_too_wide_for_a_table_are_printed_field_by_field(terminal: Terminal) -> None:
    shown = terminal.render([*KEYS, *KEYS], 60)

    assert f"id          {ID}\n" in shown
    assert "note        -\n\n" in shown, "an empty line between two rows"


def test_an_empty_list_prints_its_placeholder(terminal: Terminal) -> None:
    assert terminal.render([], 80) == "none\n"
