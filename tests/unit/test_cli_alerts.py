"""`gatehouse alerts` on a stopped appliance: managing webhooks, listing deliveries, and errors."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from appliance.base.db import Database
from appliance.cli.main import main
from appliance.metering.alerts.outbox import Message, enqueue
from tests.support.alerts import TARGET
from tests.support.clock import START

pytestmark = pytest.mark.usefixtures("own_logging")


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    """Run a command and return what it printed as JSON."""
    assert main([*arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_webhooks_are_added_listed_rotated_and_removed(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tenant = run_json(capsys, "tenants", "create", "bob")
    made = run_json(capsys, "alerts", "add", TARGET, "--tenant", "bob", "--event", "invoice.closed")
    assert (made["kind"], made["tenant_id"], made["events"]) == ("webhook", tenant["id"], ["invoice.closed"])
    assert made["secret"].startswith("whsec_")
    assert [row["id"] for row in run_json(capsys, "alerts", "list", "--tenant", "bob")["data"]] == [made["id"]]
    assert run_json(capsys, "alerts", "rotate", made["id"], "--grace-s", "60")["secret"] != made["secret"]
    assert run_json(capsys, "alerts", "remove", made["id"])["id"] == made["id"]
    assert run_json(capsys, "alerts", "deliveries", made["id"], status=1)["error"]["code"] == "not_found"


def test_adding_a_webhook_prints_its_secret_once_with_a_warning(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alerts", "add", TARGET]) == 0
    printed = capsys.readouterr()
    assert "whsec_" in printed.out
    assert "not shown again" in printed.err
    assert main(["alerts", "list"]) == 0
    assert "whsec_" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["add", "http://example.com/"], 2, "webhook_networks"),
        (["add", "https://127.0.0.1/"], 2, "webhook_networks"),
        (["add", "ops@example.com"], 2, "smtp_url"),
        (["add", "example.com/alerts"], 2, "must be a URL like https://"),
        (["add", TARGET, "--event", "everything"], 2, "events must be one of"),
        (["add", TARGET, "--tenant", "nobody"], 1, "tenant"),
        (["test", "wh_1"], 1, "is not running"),
        (["deliveries", "wh_1"], 1, "no such webhook"),
        (["retry", "wh_1", "msg_1"], 1, "no such webhook"),
        (["rotate", "wh_1"], 1, "no such webhook"),
    ],
)
def test_errors_are_reported_on_one_line(
    data_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, words: str
) -> None:
    assert main(["alerts", *arguments]) == status
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert words in printed.err


def test_with_a_mail_server_configured_an_e_mail_target_can_be_added(
    data_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEHOUSE_SMTP_URL", "smtp://localhost:25")
    monkeypatch.setenv("GATEHOUSE_SMTP_FROM", "gatehouse@example.com")
    made = run_json(capsys, "alerts", "add", "ops@example.com")
    assert (made["kind"], made["target"], made["secret"]) == ("email", "ops@example.com", None)


def test_deliveries_are_listed_with_their_message(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    webhook_id = run_json(capsys, "alerts", "add", TARGET)["id"]
    data = {"scope": "model", "model": "demo", "percent": 80, "day": "2026-11-21", "tokens_per_day": 10, "tokens": 9}

    async def write() -> None:
        database = Database.open(f"sqlite:///{data_dir / 'gatehouse.db'}")
        async with database.writing() as connection:
            await connection.run_sync(enqueue, START, [Message("tokens_per_day.threshold", "a model", data)])
        await database.close()

    asyncio.run(write())
    assert main(["alerts", "deliveries", webhook_id]) == 0
    header, line = (row.split("\t") for row in capsys.readouterr().out.splitlines())
    assert (
        line[header.index("about")]
        == "All tenants together have reached 80 % of the token limit of 2026-11-21 for the model demo"
    )
    (row,) = run_json(capsys, "alerts", "deliveries", webhook_id)["data"]
    assert row["payload"]["data"] == data
