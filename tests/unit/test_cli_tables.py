"""Tables on a terminal never truncate ids, which the next command needs, or anything else."""

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
    """Prints tables on a terminal of a given width and returns what is read there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def shows(self, rows: list[dict[str, Any]], width: int) -> str:
        self._monkeypatch.setenv("COLUMNS", str(width))
        self._monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        output.table(rows, COLUMNS, empty="none")
        return re.sub(r"\x1b\[[0-9;]*m", "", self._capsys.readouterr().out)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(monkeypatch, capsys)


@pytest.mark.parametrize("width", [40, 80, 100, 120, 200])
def test_ids_are_whole_and_nothing_is_cut(terminal: Terminal, width: int) -> None:
    shown = terminal.shows(KEYS, width)

    assert ID in shown
    assert TENANT_ID in shown
    assert "…" not in shown
    assert {"nightly", "finance"} <= set(shown.split())
    assert re.search(r"2026-11-24[ T]15:24:37|2026-11-24 .*\n.* 15:24:37Z", shown)


def test_a_table_that_fits_is_one(terminal: Terminal) -> None:
    head, row = terminal.shows(KEYS, 160).splitlines()

    assert head.split() == ["id", "tenant", "id", "name", "created", "at", "note"]
    assert row.split()[0] == ID


def test_rows_too_wide_for_a_table_are_told_field_by_field(terminal: Terminal) -> None:
    shown = terminal.shows([*KEYS, *KEYS], 60)

    assert f"id          {ID}\n" in shown
    assert "note        -\n\n" in shown, "an empty line between two rows"


def test_an_empty_list_is_a_sentence(terminal: Terminal) -> None:
    assert terminal.shows([], 80) == "none\n"
