"""`gatehouse audit`: listing, verification, and the report of tampering."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from appliance.base.clock import SystemClock
from appliance.base.db import Database
from appliance.cli import output
from appliance.cli.main import main
from appliance.cli.operator import operator
from appliance.tenancy.audit import record

TRIGGERS = "DROP TRIGGER audit_log_no_update; DROP TRIGGER audit_log_no_delete;"


@pytest.fixture
def file(tmp_path: Path, migrated_sqlite_file: Path, monkeypatch: pytest.MonkeyPatch, own_logging: None) -> Path:
    """The database of an appliance that does not run, with three entries."""
    path = tmp_path / "gatehouse.db"
    shutil.copyfile(migrated_sqlite_file, path)
    monkeypatch.setenv("GATEHOUSE_DATA_DIR", str(tmp_path))

    async def write() -> None:
        database = Database.open(f"sqlite:///{path}")
        for number in range(3):
            async with database.writing() as connection:
                await record(connection, SystemClock(), "tier.update", "tier", f"tier {number}", after={"wait": number})
        await database.close()

    asyncio.run(write())
    return path


def tamper(path: Path, statement: str) -> None:
    """Change the file as somebody with a SQL shell would."""
    connection = sqlite3.connect(path)
    connection.executescript(TRIGGERS + statement)
    connection.close()


def verified(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    status = main(["audit", "verify", "--json", *arguments])
    return status, json.loads(capsys.readouterr().out)


def test_a_whole_log_is_told_with_its_last_hash(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "verify"]) == 0
    told = capsys.readouterr().out
    status, answer = verified(capsys)
    assert (status, answer["ok"], answer["entries"], answer["fault"]) == (0, True, 3, None)
    assert f"3 entries, hash of the last one: {answer['hash']}" in told


@pytest.mark.parametrize(
    ("statement", "kind", "words"),
    [
        ("UPDATE audit_log SET after = 'x' WHERE id = 2;", "changed", "entry 2 was changed"),
        ("DELETE FROM audit_log WHERE id = 2;", "removed", "entry 2 was removed"),
        ("DELETE FROM audit_log WHERE id = 3;", "cut", "entry 3 was cut off at the end"),
    ],
)
def test_a_log_that_was_changed_ends_with_status_1_and_names_the_entry(
    file: Path, capsys: pytest.CaptureFixture[str], statement: str, kind: str, words: str
) -> None:
    tamper(file, statement)
    assert main(["audit", "verify"]) == 1
    assert words in capsys.readouterr().err
    status, answer = verified(capsys)
    assert (status, answer["ok"], answer["fault"]["kind"]) == (1, False, kind)
    assert words in answer["fault"]["message"]


def test_a_hash_that_was_noted_must_be_there_still(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, before = verified(capsys)
    assert verified(capsys, "--expect", before["hash"])[0] == 0
    tamper(file, "DELETE FROM audit_log; DELETE FROM audit_head;")
    assert verified(capsys)[0] == 0
    status, answer = verified(capsys, "--expect", before["hash"])
    assert (status, answer["fault"]["kind"]) == (1, "not_expected")


def test_an_empty_log_has_no_last_hash(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tamper(file, "DELETE FROM audit_log; DELETE FROM audit_head;")
    assert main(["audit", "verify"]) == 0
    assert capsys.readouterr().out == "Audit log verified: 0 entries\n"


@pytest.mark.parametrize("wrong", ["abc", "G" * 64, "", "0" * 64])
def test_what_is_no_hash_is_a_wrong_call(file: Path, capsys: pytest.CaptureFixture[str], wrong: str) -> None:
    assert main(["audit", "verify", "--expect", wrong]) == 2
    assert "64 hexadecimal digits" in capsys.readouterr().err


def test_a_long_walk_shows_how_far_it_is(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[str, float]] = []

    class Bar:
        def __init__(self, title: str, quiet: bool) -> None:
            self.title, self.quiet = title, quiet

        def __enter__(self) -> Any:
            return lambda fraction: steps.append((self.title, fraction))

        def __exit__(self, *_: object) -> None:
            return None

    monkeypatch.setattr(output, "progress", lambda title, *, quiet: Bar(title, quiet))
    assert main(["audit", "verify"]) == 0
    assert steps == [("Verifying the audit log", 1.0)]


def test_entries_are_listed_and_narrowed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "list", "--json", "--target", "tier 1"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["data"]
    assert (row["id"], row["action"], row["after"], row["before"]) == ("2", "tier.update", {"wait": 1}, None)
    assert main(["audit", "list", "--limit", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[4] for line in lines] == ["target", "tier tier 2", "tier tier 1"]
    assert main(["audit", "list", "--start", "yesterday"]) == 2
    assert "start must be an RFC 3339 time" in capsys.readouterr().err


def test_what_a_command_changes_is_done_by_the_user_of_the_machine(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["admin", "token", "nightly", "--json"]) == 0
    secret = json.loads(capsys.readouterr().out)["token"]
    assert main(["audit", "list", "--json", "--action", "token.create"]) == 0
    written = capsys.readouterr().out
    (row,) = json.loads(written)["data"]
    assert row["actor"] == {"kind": "cli", "id": None, "name": operator().name}
    assert row["after"]["name"] == "nightly"
    assert secret not in written


def test_a_user_without_a_name_acts_under_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr("getpass.getuser", nameless)
    assert operator().name.startswith("user ")


def test_a_command_acts_as_the_user_of_this_machine(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "zoë")
    assert main(["tenants", "create", "dora", "--json"]) == 0
    capsys.readouterr()
    assert main(["audit", "list", "--action", "tenant.create", "--json"]) == 0
    newest = json.loads(capsys.readouterr().out)["data"][0]
    assert (newest["actor"]["kind"], newest["actor"]["name"]) == ("cli", "zoë")
