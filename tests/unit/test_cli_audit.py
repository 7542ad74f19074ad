"""`gatehouse audit`: listing entries, verifying the hash chain, and the actor that commands record."""

from __future__ import annotations

import asyncio
import json
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
def audit_log_file(data_dir: Path, own_logging: None) -> Path:
    """The database of a stopped appliance whose audit log has three entries."""
    path = data_dir / "gatehouse.db"

    async def write() -> None:
        database = Database.open(f"sqlite:///{path}")
        for number in range(3):
            async with database.writing() as connection:
                await record(connection, SystemClock(), "tier.update", "tier", f"tier {number}", after={"wait": number})
        await database.close()

    asyncio.run(write())
    return path


def tamper(path: Path, statement: str) -> None:
    """Run SQL on the database after dropping the triggers that protect the audit log."""
    connection = sqlite3.connect(path)
    connection.executescript(TRIGGERS + statement)
    connection.close()


def run_verify(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    status = main(["audit", "verify", "--json", *arguments])
    return status, json.loads(capsys.readouterr().out)


def test_verifying_an_intact_log_prints_the_count_and_the_last_hash(
    audit_log_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", "verify"]) == 0
    printed = capsys.readouterr().out
    status, answer = run_verify(capsys)
    assert (status, answer["ok"], answer["entries"], answer["fault"]) == (0, True, 3, None)
    assert f"3 entries, hash of the last one: {answer['hash']}" in printed


@pytest.mark.parametrize(
    ("statement", "kind", "words"),
    [
        ("UPDATE audit_log SET after = 'x' WHERE id = 2;", "changed", "entry 2 was changed"),
        ("DELETE FROM audit_log WHERE id = 2;", "removed", "entry 2 was removed"),
        ("DELETE FROM audit_log WHERE id = 3;", "cut", "entry 3 was cut off at the end"),
    ],
)
def test_verifying_a_changed_log_names_the_entry_and_exits_with_1(
    audit_log_file: Path, capsys: pytest.CaptureFixture[str], statement: str, kind: str, words: str
) -> None:
    tamper(audit_log_file, statement)
    assert main(["audit", "verify"]) == 1
    assert words in capsys.readouterr().err
    status, answer = run_verify(capsys)
    assert (status, answer["ok"], answer["fault"]["kind"]) == (1, False, kind)
    assert words in answer["fault"]["message"]


def test_with_expect_a_recorded_hash_must_be_in_the_log(audit_log_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, before = run_verify(capsys)
    assert run_verify(capsys, "--expect", before["hash"])[0] == 0
    tamper(audit_log_file, "DELETE FROM audit_log; DELETE FROM audit_head;")
    assert run_verify(capsys)[0] == 0
    status, answer = run_verify(capsys, "--expect", before["hash"])
    assert (status, answer["fault"]["kind"]) == (1, "not_expected")


def test_an_empty_log_is_verified_without_a_hash(audit_log_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tamper(audit_log_file, "DELETE FROM audit_log; DELETE FROM audit_head;")
    assert main(["audit", "verify"]) == 0
    assert capsys.readouterr().out == "Audit log verified: 0 entries\n"


@pytest.mark.parametrize("wrong", ["abc", "G" * 64, "", "0" * 64])
def test_an_invalid_expected_hash_is_a_usage_error(
    audit_log_file: Path, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    assert main(["audit", "verify", "--expect", wrong]) == 2
    assert "64 hexadecimal digits" in capsys.readouterr().err


def test_verifying_shows_a_progress_bar(
    audit_log_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[str, float]] = []

    class RecordingProgress:
        def __init__(self, title: str, quiet: bool) -> None:
            self.title, self.quiet = title, quiet

        def __enter__(self) -> Any:
            return lambda fraction: steps.append((self.title, fraction))

        def __exit__(self, *_: object) -> None:
            return None

    monkeypatch.setattr(output, "progress", lambda title, *, quiet: RecordingProgress(title, quiet))
    assert main(["audit", "verify"]) == 0
    assert steps == [("Verifying the audit log", 1.0)]


def test_entries_are_listed_and_filtered(audit_log_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "list", "--json", "--target", "tier 1"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["data"]
    assert (row["id"], row["action"], row["after"], row["before"]) == ("2", "tier.update", {"wait": 1}, None)
    assert main(["audit", "list", "--limit", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[4] for line in lines] == ["target", "tier tier 2", "tier tier 1"]
    assert main(["audit", "list", "--start", "yesterday"]) == 2
    assert "start must be an RFC 3339 time" in capsys.readouterr().err


def test_a_list_that_a_limit_cut_short_says_so(audit_log_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for limit, has_more in ("2", True), ("100", False):
        assert main(["audit", "list", "--limit", limit]) == 0
        note = "There are more than these 2: give a larger --limit.\n" if has_more else ""
        assert capsys.readouterr().err == note
        assert main(["audit", "list", "--limit", limit, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["has_more"] is has_more


def test_a_change_is_logged_with_the_operating_system_user_and_without_secrets(
    audit_log_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["admin", "token", "nightly", "--json"]) == 0
    secret = json.loads(capsys.readouterr().out)["token"]
    assert main(["audit", "list", "--json", "--action", "token.create"]) == 0
    written = capsys.readouterr().out
    (row,) = json.loads(written)["data"]
    assert row["actor"] == {"kind": "cli", "id": None, "name": operator().name}
    assert row["after"]["name"] == "nightly"
    assert secret not in written


def test_a_user_without_a_name_is_recorded_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_unknown_user() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr("getpass.getuser", raise_unknown_user)
    assert operator().name.startswith("user ")


def test_the_current_operating_system_user_is_read_for_each_command(
    audit_log_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "zoë")
    assert main(["tenants", "create", "dora", "--json"]) == 0
    capsys.readouterr()
    assert main(["audit", "list", "--action", "tenant.create", "--json"]) == 0
    newest = json.loads(capsys.readouterr().out)["data"][0]
    assert (newest["actor"]["kind"], newest["actor"]["name"]) == ("cli", "zoë")
