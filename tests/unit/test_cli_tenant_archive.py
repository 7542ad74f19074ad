"""`gatehouse tenants archive`, which cannot be undone: asked on a terminal, refused elsewhere unless --yes says it."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from appliance.cli.main import main


class Answer(NamedTuple):
    status: int
    out: str
    err: str


class Terminal(io.StringIO):
    """What somebody types at a terminal."""

    def isatty(self) -> bool:
        return True


Run = Callable[..., Answer]


@pytest.fixture
def typed(
    tmp_path: Path,
    migrated_sqlite_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    own_logging: None,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Run commands on an appliance that does not run, with the tenant `bob`; `at_terminal` is what is typed there."""
    for name in [name for name in os.environ if name.startswith("GATEHOUSE_")]:
        monkeypatch.delenv(name)
    shutil.copyfile(migrated_sqlite_file, tmp_path / "gatehouse.db")
    monkeypatch.setenv("GATEHOUSE_DATA_DIR", str(tmp_path))

    def run(*arguments: str, at_terminal: str | None = None) -> Answer:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.StringIO() if at_terminal is None else Terminal(at_terminal))
            patch.setattr(sys.stderr, "isatty", lambda: at_terminal is not None)
            status = main(list(arguments))
        return Answer(status, *capsys.readouterr())

    assert run("tenants", "create", "bob").status == 0
    return run


def archived(typed: Run) -> list[bool]:
    rows: list[dict[str, Any]] = json.loads(typed("tenants", "list", "--archived", "--json").out)["data"]
    return [row["archived"] for row in rows]


def test_a_program_must_say_yes(typed: Run) -> None:
    refused = typed("tenants", "archive", "bob")
    assert refused.status == 2
    assert "--yes" in refused.err
    assert archived(typed) == [False]
    assert typed("tenants", "archive", "bob", "--yes").status == 0
    assert archived(typed) == [True]


def test_on_a_terminal_it_is_told_what_happens_and_the_name_is_asked_for(typed: Run) -> None:
    answer = typed("tenants", "archive", "bob", "--json", at_terminal="bob\n")
    assert answer.status == 0
    assert "are refused" in answer.err
    assert "Type the name bob to confirm" in answer.err
    assert answer.out.startswith("{")
    assert archived(typed) == [True]


@pytest.mark.parametrize(("typing", "status"), [("Bob\n", 1), ("yes\n", 1), ("", 130)])
def test_anything_but_the_name_changes_nothing(typed: Run, typing: str, status: int) -> None:
    assert typed("tenants", "archive", "bob", at_terminal=typing).status == status
    assert archived(typed) == [False]


def test_a_tenant_that_is_archived_already_is_not_asked_about(typed: Run) -> None:
    typed("tenants", "archive", "bob", "--yes")
    answer = typed("tenants", "archive", "bob", at_terminal="")
    assert (answer.status, answer.err) == (0, "")


def test_a_tenant_that_is_not_there_is_not_asked_about(typed: Run) -> None:
    answer = typed("tenants", "archive", "nobody", at_terminal="nobody\n")
    assert answer.status == 1
    assert "no tenant 'nobody'" in answer.err
