"""Command lines: output for people and programs, and exit status."""

from __future__ import annotations

import asyncio
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pyotp
import pytest

from appliance.base.clock import SystemClock
from appliance.base.database_claim import DatabaseClaim, claim_database
from appliance.base.db import Database
from appliance.base.sealing import Sealer
from appliance.base.version import current_version
from appliance.cli import model_store, output
from appliance.cli.main import main
from appliance.metering.alerts.targets import TargetPolicy
from appliance.metering.alerts.webhooks import SEALING_PURPOSE, Webhooks
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.journal_records import JournaledEvent, encode, open_journal, replay
from appliance.serving.model_builder import DEMO_MODEL
from appliance.tenancy.access import WHOLE_APPLIANCE
from appliance.tenancy.admin_tokens import AdminTokens
from appliance.tenancy.members import Member, Members
from appliance.tenancy.pages import PAGE_ROWS_DEFAULT
from appliance.tenancy.second_factor import SecondFactors
from engine import visible_gpu
from engine.visible_gpu import VisibleGpu
from tests.support import factories
from tests.support.cast import make_cast
from tests.support.databases import Cluster
from tests.support.ledgers import running_ledger
from tests.support.typed_commands import CommandResult

REPO = Path(__file__).resolve().parents[2]
COMMANDS = (
    ["serve"], ["doctor"], ["usage"], ["simulate"], ["version"],
    ["models", "list"], ["models", "add"], ["models", "verify"], ["models", "remove"],
    ["tenants", "list"], ["tenants", "create"], ["tenants", "show"], ["tenants", "update"], ["tenants", "archive"],
    ["keys", "list"], ["keys", "create"], ["keys", "update"], ["keys", "rotate"], ["keys", "revoke"],
    ["members", "list"], ["members", "invite"], ["members", "set-role"], ["members", "remove"], ["members", "disable"],
    ["members", "enable"], ["limits", "tiers"], ["limits", "tier"], ["limits", "models"], ["limits", "model"],
    ["limits", "free-model"],
    ["alerts", "list"], ["alerts", "add"], ["alerts", "rotate"], ["alerts", "remove"], ["alerts", "test"],
    ["alerts", "deliveries"], ["alerts", "retry"],
    ["invoices", "list"], ["invoices", "draft"], ["invoices", "discard"], ["invoices", "close"], ["invoices", "export"],
    ["invoices", "seller"], ["invoices", "allowance"], ["economics"],
    ["ledger", "list"], ["ledger", "correct"], ["prices", "list"], ["prices", "add"], ["prices", "withdraw"],
    ["db", "upgrade"], ["db", "downgrade"], ["db", "check"], ["db", "rebuild-rollups"],
    ["admin", "create"], ["admin", "reset-password"], ["admin", "token"], ["admin", "reset-second-factor"],
    ["admin", "unlink-provider"], ["audit", "list"], ["audit", "verify"],
)  # fmt: skip
WITHOUT_JSON = {"serve"}


@pytest.fixture
def data_dir(tmp_path: Path, migrated_sqlite_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data folder of an appliance that does not run."""
    for name in [name for name in os.environ if name.startswith("GATEHOUSE_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "data"
    folder.mkdir()
    shutil.copyfile(migrated_sqlite_file, folder / "gatehouse.db")
    monkeypatch.setenv("GATEHOUSE_DATA_DIR", str(folder))
    return folder


@pytest.fixture
def typed(data_dir: Path, own_logging: None, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> CommandResult:
        status = main(list(arguments))
        return CommandResult(status, *capsys.readouterr())

    return run


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_and_offers_json(command: list[str], typed: Any) -> None:
    answer = typed(*command, "--help")
    assert answer.status == 0
    assert answer.out.startswith(f"Usage: gatehouse {' '.join(command)}")
    assert ("--json" in answer.out) == (command[0] not in WITHOUT_JSON)


@pytest.mark.parametrize("group", ["", *sorted({command[0] for command in COMMANDS if len(command) > 1})])
def test_no_summary_is_cut_at_80_columns(group: str, typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    summaries = typed(*group.split(), "--help").out.partition("Commands:\n")[2].splitlines()
    assert summaries
    assert [line for line in summaries if line.endswith("...") or not line.endswith(".")] == []


def test_the_version_costs_no_imports() -> None:
    program = (
        "import sys; from appliance.cli.main import main; main(['version']); "
        "print(sorted({'typer', 'rich', 'litestar', 'sqlalchemy', 'httpx', 'torch'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines() == [f"gatehouse {current_version()}", "[]"]


def test_the_version_is_told_as_an_option_too(typed: Any) -> None:
    version = f"gatehouse {current_version()}\n"
    assert (typed("--version").out, typed("--version", "tenants").out) == (version, version)


@pytest.mark.parametrize("command", [[], ["tenants"], ["tenants", "create"]], ids=" ".join)
def test_a_short_option_shows_the_help_too(command: list[str], typed: Any) -> None:
    assert typed(*command, "-h").out == typed(*command, "--help").out != ""


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_arguments_are_named_in_capitals(command: list[str], typed: Any) -> None:
    usage = typed(*command, "--help").out.partition("\n")[0].removeprefix(f"Usage: gatehouse {' '.join(command)}")
    assert usage == usage.upper()


def test_no_command_shows_the_help(typed: Any) -> None:
    answer = typed()
    assert answer.status == 2
    assert "Commands:" in answer.err


def test_an_unknown_command_is_a_usage_error(typed: Any) -> None:
    assert typed("tennants").status == 2


def test_a_usage_error_is_json_when_asked(typed: Any) -> None:
    answer = typed("tenants", "create", "--json")
    assert answer.status == 2
    assert answer.json()["error"]["code"] == "usage"


@pytest.mark.parametrize(
    "command",
    [
        ["usage", "--bucket", "year"], ["usage", "--start", "yesterday"], ["tenants", "create", "dora", "--tier", "gold"],
        ["tenants", "create", "dora", "--weight", "-1"], ["limits", "tier", "nope", "--admission-wait-ms", "5"],
        ["limits", "tier", "batch", "--admission-wait-ms", "-5"], ["limits", "model", "m", "--mode", "softly"],
        ["simulate", "--policy", "best"], ["serve", "--device", "tpu"], ["admin", "create", "no address"],
        ["plan", "llama-3.1-8b", "--gpu", "none"], ["invoices", "list", "--month", "June"],
        ["audit", "list", "--start", "then"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_is_asked_wrongly_ends_with_the_status_of_wrong_usage(typed: Any, command: list[str]) -> None:
    answer = typed(*command)
    assert (answer.status, answer.out) == (2, "")
    assert answer.err


def test_a_setting_that_cannot_be_parsed_names_itself(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEHOUSE_PORT", "many")
    answer = typed("tenants", "list")
    assert answer.status == 1
    assert "GATEHOUSE_PORT" in answer.err


@pytest.mark.parametrize("option", ["--data-dir", "--data-dir=somewhere", "--database", "--json"])
def test_an_option_in_front_of_the_command_is_told_its_place(typed: Any, option: str) -> None:
    answer = typed(option, "somewhere", "doctor")
    name = option.partition("=")[0]
    assert answer.status == 2
    assert f"{name} must come after the command" in answer.out + answer.err


def test_an_unknown_setting_stops_the_command(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEHOUSE_PROT", "8000")
    assert typed("tenants", "list", "--json").json()["error"]["code"] == "invalid_setting"


@pytest.mark.parametrize(
    "command", [["tenants", "list"], ["prices", "list"], ["usage"], ["db", "check"], ["audit", "verify"]], ids=" ".join
)
def test_a_command_that_reads_makes_no_appliance(typed: Any, tmp_path: Path, command: list[str]) -> None:
    nowhere = tmp_path / "typo"
    answer = typed(*command, "--data-dir", str(nowhere), "--json")
    assert (answer.status, answer.json()["error"]["code"]) == (1, "no_appliance")
    assert str(nowhere) in answer.json()["error"]["message"]
    assert "--data-dir" in answer.json()["error"]["message"]
    assert not nowhere.exists()


@pytest.mark.parametrize(
    "command", [["tenants", "list"], ["db", "check"], ["db", "upgrade"], ["admin", "token", "--list"]], ids=" ".join
)
def test_a_database_that_does_not_answer_is_told_without_its_password(typed: Any, command: list[str]) -> None:
    answer = typed(*command, "--database", "postgresql://u:hunter2@127.0.0.1:1/db", "--json")
    assert answer.status == 1
    assert answer.json()["error"]["code"] == "database"
    assert "hunter2" not in answer.out + answer.err


def test_a_data_folder_that_cannot_be_used_is_told(typed: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    below = typed("serve", "--data-dir", str(tmp_path / "file" / "data"))
    assert below.status == 1
    assert "choose another folder with --data-dir" in below.err
    itself = typed("tenants", "list", "--data-dir", str(tmp_path / "file"), "--json")
    assert itself.status == 2
    assert itself.json()["error"]["code"] == "invalid_setting"


def test_a_tenant_lives_through_its_commands(typed: Any) -> None:
    made = typed("tenants", "create", "bob", "--tokens-per-minute", "1000", "--model", "demo", "--json").json()
    assert made["limits"]["tokens_per_minute"] == 1000
    assert made["allowed_models"] == ["demo"]
    changed = typed("tenants", "update", "bob", "--tokens-per-minute", "none", "--model", "all", "--suspend", "--json").json()
    assert (changed["limits"]["tokens_per_minute"], changed["allowed_models"], changed["suspended"]) == (None, None, True)
    assert typed("tenants", "show", made["id"], "--json").json() == changed
    assert typed("tenants", "archive", "bob", "--yes", "--json").json()["archived"] is True
    assert typed("tenants", "list", "--json").json() == {"data": []}
    assert [row["name"] for row in typed("tenants", "list", "--archived", "--json").json()["data"]] == ["bob"]


def test_a_taken_name_is_refused_with_the_servers_code(typed: Any) -> None:
    typed("tenants", "create", "bob")
    answer = typed("tenants", "create", "bob", "--json")
    assert answer.status == 1
    assert answer.json()["error"]["code"] == "name_taken"


def test_an_update_that_changes_nothing_is_a_usage_error(typed: Any) -> None:
    typed("tenants", "create", "bob")
    assert typed("tenants", "update", "bob").status == 2


@pytest.mark.parametrize("value", ["many", "-5", "1.5", "", "99999999999999999999", "1000000000000001"])
def test_a_limit_that_is_no_number_is_a_usage_error(typed: Any, value: str) -> None:
    assert typed("tenants", "create", "bob", "--tokens-per-day", value).status == 2


def test_a_stranger_is_not_found(typed: Any) -> None:
    answer = typed("keys", "create", "charlie")
    assert answer.status == 1
    assert "charlie" in answer.err


def test_keys_of_a_tenant_without_a_name_are_not_those_of_all(typed: Any) -> None:
    typed("tenants", "create", "bob")
    typed("keys", "create", "bob")

    assert typed("keys", "list", "--tenant", "", "--json").status == 1


def test_a_key_is_shown_once_then_rotated_and_revoked(typed: Any) -> None:
    typed("tenants", "create", "bob")
    made = typed("keys", "create", "bob", "--name", "laptop", "--network", "10.0.0.0/8", "--json").json()
    assert made["key"].startswith(made["prefix"])
    assert made["allowed_networks"] == ["10.0.0.0/8"]
    listed = typed("keys", "list", "--tenant", "bob", "--json")
    assert listed.json()["data"][0]["tenant"] == "bob"
    assert made["key"] not in listed.out
    fresh = typed("keys", "rotate", made["prefix"], "--json").json()
    assert fresh["key"] != made["key"]
    revoked = typed("keys", "revoke", fresh["id"], "--json").json()
    assert revoked["revoked_at"] is not None
    assert typed("keys", "revoke", "nothing").status == 1


def test_into_a_pipe_goes_a_line_per_row_under_a_header(typed: Any) -> None:
    typed("tenants", "create", "bob")
    lines = typed("tenants", "list").out.splitlines()
    assert lines[0].split("\t")[:2] == ["id", "name"]
    assert lines[1].split("\t")[1] == "bob"


def test_usage_of_an_idle_appliance_is_empty(typed: Any) -> None:
    assert typed("usage", "--json").json() == {"data": []}
    assert typed("usage", "--group-by", "model").out.startswith("start\tmodel\t")


def test_usage_is_that_of_the_keys_and_models_that_are_named(typed: Any) -> None:
    typed("tenants", "create", "bob")
    made = typed("keys", "create", "bob", "--json").json()
    assert typed("usage", "--key", made["prefix"], "--model", "demo", "--model", "other", "--json").json() == {"data": []}
    assert "no key" in typed("usage", "--key", "gh_nothing").err


def test_usage_by_several_groups_shows_each_of_them(typed: Any) -> None:
    assert typed("usage", "--group-by", "tenant,key").out.startswith("start\ttenant\tkey_id\trequests\t")


def test_the_audit_log_of_a_tenant_is_asked_for_by_its_name(typed: Any) -> None:
    made = typed("tenants", "create", "dora", "--json").json()
    entries = typed("audit", "list", "--tenant", "dora", "--json").json()["data"]
    assert [(entry["action"], entry["tenant_id"]) for entry in entries] == [("tenant.create", made["id"])]
    assert "no tenant 'nobody'" in typed("audit", "list", "--tenant", "nobody").err


def test_usage_refuses_what_the_server_refuses(typed: Any) -> None:
    assert typed("usage", "--bucket", "year").status == 2


def test_somebody_may_sign_in_and_get_a_new_password(typed: Any) -> None:
    made = typed("admin", "create", "alice@example.com", "--role", "owner", "--json").json()
    assert made["role"] == "owner"
    renewed = typed("admin", "reset-password", "alice@example.com", "--json").json()
    assert renewed["password"] != made["password"]
    assert typed("admin", "reset-password", "nobody@example.com").status == 1
    for command in ("reset-second-factor", "unlink-provider"):
        assert typed("admin", command, "Alice@example.com", "--json").json()["id"] == made["id"]
        assert typed("admin", command, "nobody@example.com").status == 1
    assert typed("admin", "create", "alice@example.com", "--json").json()["error"]["code"] == "name_taken"


def test_a_password_is_temporary_if_that_is_asked_for(typed: Any, data_dir: Path) -> None:
    async def find() -> Member:
        async with Database.open(f"sqlite:///{data_dir / 'gatehouse.db'}") as database:
            return await Members(database, SystemClock()).get_by_email("alice@example.com")

    for command in "create", "reset-password":
        answer = typed("admin", command, "alice@example.com", "--temporary")
        assert (answer.status, "must be replaced at the next sign-in" in answer.err) == (0, True)
        assert asyncio.run(find()).password_temporary
        typed("admin", "reset-password", "alice@example.com")
        assert not asyncio.run(find()).password_temporary
    for path in ("admin", "create"), ("members", "invite"):
        assert "emporary" in typed(*path, "--help").out


@pytest.mark.parametrize("command", ["create", "reset-password"])
def test_a_password_from_standard_input_is_noted_as_temporary_if_it_is(
    command: str, typed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed("admin", "create", "dora@example.com")
    address = "dora@example.com" if command == "reset-password" else "emil@example.com"
    arguments = ("admin", command, address, "--password-stdin")
    for options, note in (("--temporary",), "The password is temporary and must be replaced at the next sign-in.\n"), ((), ""):
        monkeypatch.setattr("sys.stdin", io.StringIO("a password that is long\n"))
        answer = typed(*arguments, *options)
        assert (answer.status, answer.err) == (0, note)
        arguments = ("admin", "reset-password", *arguments[2:])


def test_a_given_password_is_not_printed(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("correct horse battery\n"))
    assert "correct horse" not in typed("admin", "create", "alice@example.com", "--password-stdin").out


def test_every_token_is_listed_however_many_there_are(typed: Any, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def create() -> None:
        database = Database.open(f"sqlite:///{data_dir / 'gatehouse.db'}")
        for number in range(PAGE_ROWS_DEFAULT + 1):
            await AdminTokens(database, SystemClock()).create(f"token {number}", "viewer")
        await database.close()

    asyncio.run(create())
    for page_rows in (PAGE_ROWS_DEFAULT, 1000):
        monkeypatch.setattr("appliance.tenancy.pages.PAGE_ROWS_MAX", page_rows)
        assert len(typed("admin", "token", "--list", "--json").json()["data"]) == PAGE_ROWS_DEFAULT + 1


def test_an_administrator_token_is_shown_once_and_can_be_revoked(typed: Any) -> None:
    made = typed("admin", "token", "ci", "--role", "viewer", "--json").json()
    listed = typed("admin", "token", "--list", "--json")
    assert made["token"] not in listed.out
    assert typed("admin", "token", "--revoke", made["id"], "--json").json()["revoked_at"] is not None
    assert typed("admin", "token").status == 2
    for verb in ("create", "list", "revoke"):  # as with keys; it would be a token that nobody asked for
        assert typed("admin", "token", verb, "--json").status == 2


def test_the_database_is_checked_downgraded_and_upgraded(typed: Any) -> None:
    assert typed("db", "check").status == 0
    assert typed("db", "downgrade", "base").status == 2
    assert typed("db", "downgrade", "base", "--yes", "--json").json()["revision"] is None
    assert typed("db", "check").status == 1
    upgraded = typed("db", "upgrade", "--json").json()
    assert upgraded["revision"] == upgraded["head"]


def test_a_long_check_of_the_database_shows_a_bar(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, bool]] = []

    def progress(title: str, *, quiet: bool) -> Any:
        shown.append((title, quiet))
        return nullcontext(lambda _fraction: None)

    monkeypatch.setattr(output, "progress", progress)
    typed("db", "check")
    typed("db", "check", "--json")
    assert shown == [("Checking the ledger", False), ("Checking the ledger", True)]


def test_a_downgrade_waits_until_the_journal_is_in_the_tables(typed: Any, data_dir: Path) -> None:
    asyncio.run(leave_in_the_journal(data_dir / "gatehouse.db"))
    refused = typed("db", "downgrade", "0003", "--yes", "--json")
    assert (refused.status, refused.json()["error"]["code"]) == (1, "journal")
    assert "has records of 2 requests that are not in the tables yet" in refused.json()["error"]["message"]
    assert "gatehouse serve" in refused.json()["error"]["message"]
    asyncio.run(replay_as_a_start_does(data_dir / "gatehouse.db"))
    assert typed("db", "downgrade", "0003", "--yes", "--json").json()["revision"] == "0003"
    assert typed("db", "downgrade", "0002", "--yes", "--json").json()["revision"] == "0002"
    assert typed("db", "downgrade", "base", "--yes", "--json").json()["revision"] is None
    assert typed("db", "downgrade", "base", "--yes", "--json").status == 0


async def leave_in_the_journal(path: Path) -> None:
    """Leave what a killed appliance can: a request that was admitted, and how one ended whose row is there."""
    url, clock = f"sqlite:///{path}", SystemClock()
    database = Database.open(url)
    journal = open_journal(url)
    assert journal is not None
    try:
        cast = await make_cast(database, clock)
        async with running_ledger(database, clock, cast.epoch_id) as ledger:
            await ledger.open(served := factories.pending(cast.bob))
        admitted = factories.pending(cast.bob, batch=True)
        entry = JournaledEvent(epoch_id=cast.epoch_id, currency="EUR", billing_day=clock.now().date(), event=admitted)
        for record in (entry, factories.posted(served.request_id)):
            await journal.append(encode(record))
    finally:
        await journal.close()
        await database.close()


async def replay_as_a_start_does(path: Path) -> None:
    url = f"sqlite:///{path}"
    database, journal = Database.open(url), open_journal(url)
    assert journal is not None
    try:
        assert await replay(database, journal, SystemClock(), BillingCalendar()) == 2
    finally:
        await journal.close()
        await database.close()


def test_the_sums_are_built_again(typed: Any) -> None:
    assert typed("db", "rebuild-rollups", "--json").json() == {"rows": 0}


@pytest.mark.parametrize(
    "command",
    [["keys", "create", "bob", "--expires-at", ""], ["usage", "--start", ""], ["usage", "--end", ""]],
    ids=lambda command: " ".join(command[:-1]),
)
def test_an_empty_time_is_refused_and_not_taken_for_none_given(typed: Any, command: list[str]) -> None:
    typed("tenants", "create", "bob")
    refused = typed(*command, "--json")

    assert (refused.status, refused.json()["error"]["code"]) == (2, "invalid_value")


def test_prices_are_added_and_listed(typed: Any) -> None:
    asked = ("--prompt", "1000", "--completion", "3000", "--currency", "CHF", "--tier-percent", "batch=50")
    made = typed("prices", "add", "demo", *asked, "--json").json()
    assert (made["cached_prompt"], made["currency"], made["tier_percents"]) == (1000, "CHF", {"batch": 50})
    assert typed("prices", "list", "--model", "demo", "--json").json()["data"] == [made]
    assert typed("prices", "list", "--model", "other", "--json").json()["data"] == []
    plain = typed("prices", "add", "plain", *asked[:4], "--json").json()
    cells = {line.split("\t")[0]: line.split("\t")[-1] for line in typed("prices", "list").out.splitlines()}
    assert (cells[made["id"]], cells[plain["id"]]) == ("batch=50", "-")
    for wrong in ("batch", "batch=101", f"batch={'9' * 5000}"):
        assert typed("prices", "add", "demo", *asked[:4], "--tier-percent", wrong).status == 2
    past = typed("prices", "add", "demo", *asked, "--from", "2020-01-01T00:00:00Z", "--json")
    assert (past.status, past.json()["error"]["code"]) == (2, "invalid_value")


def test_a_price_to_come_is_withdrawn_and_one_in_force_is_not(typed: Any) -> None:
    asked = ("--prompt", "1000", "--completion", "3000")
    now = typed("prices", "add", "demo", *asked, "--json").json()
    later = typed("prices", "add", "demo", *asked, "--from", "2190-01-01T00:00:00Z", "--json").json()
    assert typed("prices", "withdraw", later["id"], "--json").json() == later
    refused = typed("prices", "withdraw", now["id"], "--json")
    assert (refused.status, refused.json()["error"]["code"]) == (1, "price_begun")
    assert typed("prices", "list", "--json").json()["data"] == [now]


def test_a_budget_says_its_unit_before_and_after(typed: Any) -> None:
    for command in (["tenants", "create"], ["tenants", "update"], ["keys", "create"], ["keys", "update"], ["limits", "model"]):
        explained = " ".join(re.sub(r"[^\w.]+", " ", typed(*command, "--help").out).split())
        assert "5000000 is 5.00 EUR" in explained
        assert ("a budget in millionths of the currency" in explained) == (command[0] != "limits")
    budget = ("--monthly-budget", "2500000")
    assert "monthly_budget=2.500000 CHF" in typed("tenants", "create", "bob", "--currency", "CHF", *budget).out
    assert "monthly_budget=0.000100 CHF" in typed("tenants", "update", "bob", "--monthly-budget", "100").out
    key = typed("keys", "create", "bob", "--json").json()
    assert "monthly_budget=2.500000 CHF" in typed("keys", "update", key["id"], *budget).out
    assert "monthly_budget=2.500000 EUR" in typed("limits", "model", "demo", *budget).out
    assert "monthly_budget=2.500000 EUR" in typed("limits", "models").out
    limited = typed("tenants", "update", "bob", "--model-limit", "demo:monthly_budget=100").out
    assert "demo=monthly_budget=0.000100 CHF" in limited
    assert typed("tenants", "show", "bob", "--json").json()["limits"]["monthly_budget"] == 100


def test_an_empty_ledger_is_listed_and_what_is_not_there_is_not_corrected(typed: Any) -> None:
    assert typed("ledger", "list", "--json").json() == {"data": []}
    assert "request_id" in typed("ledger", "list").out.split(), "what answers, log and console name a request by"
    assert typed("ledger", "correct", "7", "--note", "why", "--completion-tokens", "-5").status == 1


def test_an_unknown_revision_is_told(typed: Any) -> None:
    assert typed("db", "upgrade", "9999").status == 1


def test_a_command_before_the_first_start_takes_nothing_from_it(typed: Any, data_dir: Path) -> None:
    (data_dir / "gatehouse.db").unlink()
    typed("tenants", "list")
    typed("admin", "token", "--list")
    assert typed("admin", "create", "admin@localhost").status == 0, (
        "the first administrator was made behind the operator's back"
    )


def test_what_is_not_a_model_is_told_with_the_reason(typed: Any, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    answer = typed("models", "verify", str(tmp_path / "model"), "--json")
    assert answer.status == 1
    assert answer.json()["error"]["code"] == "not_a_model"
    assert typed("models", "add", str(tmp_path / "model")).status == 1


def test_a_format_that_is_none_is_told_with_those_that_are(typed: Any) -> None:
    answer = typed("models", "verify", str(DEMO_MODEL), "--quantization", "int3", "--json")
    assert answer.status == 2
    assert answer.json()["error"]["code"] == "invalid_option"
    assert "supported here: int8, fp8" in answer.json()["error"]["message"]


def test_only_added_models_can_be_removed(typed: Any, data_dir: Path) -> None:
    answer = typed("models", "remove", "gatehouse-demo")
    assert answer.status == 1
    assert answer.err == "gatehouse: there is no added model named 'gatehouse-demo'; no model has been added\n"
    model_store.link(DEMO_MODEL, model_store.new_model_path("tiny", data_dir))
    assert typed("models", "remove", "tinny").err.endswith("named 'tinny'; did you mean 'tiny'?\n")
    assert typed("models", "remove", "other").err.endswith("named 'other'; the added models are tiny\n")
    assert typed("models", "remove", "tiny").status == 0


def test_a_mistyped_model_is_told_the_closest_one(typed: Any, data_dir: Path) -> None:
    for command in ("models", "verify"), ("serve", "--model"):
        answer = typed(*command, "gatehouse-dmeo")
        assert answer.status == 1
        assert answer.err.endswith("; did you mean 'gatehouse-demo'?\n")
    answer = typed("models", "add", f"{DEMO_MODEL}x")
    assert answer.status == 1
    assert answer.err.endswith(f"; did you mean {str(DEMO_MODEL)!r}?\n")


async def _seal_something(url: str, pepper: bytes) -> None:
    database, clock = Database.open(url), SystemClock()
    try:
        alice = (await make_cast(database, clock)).alice
        factors = SecondFactors(database, clock, pepper)
        enrolment = factors.begin(alice)
        await factors.enable(alice, enrolment, pyotp.TOTP(enrolment.secret).at(clock.now()))
        webhooks = Webhooks(database, clock, Sealer(pepper, SEALING_PURPOSE), target_policy=TargetPolicy(), mail=False)
        await webhooks.create(kind="webhook", target="https://192.0.78.9/hook", access=WHOLE_APPLIANCE)
    finally:
        await database.close()


def test_doctor_and_db_check_say_when_secret_key_is_another_one_or_gone(typed: Any, data_dir: Path) -> None:
    def looks() -> tuple[str, str]:
        checks = typed("db", "check", "--json").json()["data"], typed("doctor", "--json").json()["data"]
        (checked,), (seen,) = ([row for row in rows if row["check"] == "secrets"] for rows in checks)
        return f"{checked['state']}: {checked['found']}", f"{seen['state']}: {seen['found']} {seen['advice']}"

    asyncio.run(_seal_something(f"sqlite:///{data_dir / 'gatehouse.db'}", b"p" * 32))
    (data_dir / "secret.key").write_bytes(b"p" * 32)
    assert looks() == ("holds: 2 sealed, each opens with secret.key", "ok: 2 sealed, all readable with secret.key ")
    (data_dir / "secret.key").write_bytes(b"q" * 32)
    checked, seen = looks()
    assert checked.startswith("broken: cannot be opened: 1 second factors: alice@example.com; 1 webhooks: wh_")
    assert seen.startswith(f"wrong: {data_dir / 'secret.key'} is not the key that sealed 2 of 2 stored secrets")
    for text in (checked, seen):
        assert "restore secret.key from the backup" in text
        assert "reset-second-factor" in text
    (data_dir / "secret.key").unlink()
    assert ["does not exist" in text for text in looks()] == [True, True]
    assert not (data_dir / "secret.key").exists(), "a look makes none"


def serve_one(data_dir: Path, **fields: Any) -> None:
    """Let Bob have one request served and settled."""

    async def use() -> None:
        clock, database = SystemClock(), Database.open(f"sqlite:///{data_dir / 'gatehouse.db'}")
        try:
            cast = await make_cast(database, clock)
            entry = factories.pending(cast.bob, admitted_at=clock.now(), **fields)
            async with running_ledger(database, clock, cast.epoch_id) as ledger:
                await ledger.open(entry)
                await ledger.settle(factories.posted(entry.request_id))
        finally:
            await database.close()

    asyncio.run(use())


def test_a_correction_that_is_too_large_names_the_option_that_confirms_it(typed: Any, data_dir: Path) -> None:
    serve_one(data_dir)
    asked = ("ledger", "correct", "1", "--note", "why", "--completion-tokens", "20000000")
    refused = typed(*asked)
    assert refused.status == 2
    assert "needs `--yes`" in refused.err
    assert typed(*asked, "--yes").status == 0


@pytest.mark.postgres
def test_doctor_says_that_a_database_is_not_in_utf_8(typed: Any, postgresql: Cluster) -> None:
    url = postgresql.create(encoding="SQL_ASCII")
    try:
        rows = {row["check"]: row for row in typed("doctor", "--database", url, "--json").json()["data"]}
    finally:
        postgresql.drop(url)
    assert rows["database"]["state"] == "wrong"
    assert "SQL_ASCII" in rows["database"]["found"]
    assert "ENCODING 'UTF8'" in rows["database"]["advice"]


def test_doctor_names_what_is_served_without_a_price(typed: Any, data_dir: Path) -> None:
    serve_one(data_dir, currency="USD")
    rows = typed("doctor", "--json").json()["data"]
    (price,) = [row for row in rows if row["check"] == "prices"]
    assert (price["state"], price["found"]) == ("note", "demo has no price in USD: its requests cost nothing")


def test_doctor_names_the_part_of_the_engine_that_is_switched_off(
    typed: Any, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "engine" not in [row["check"] for row in typed("doctor", "--json").json()["data"]]
    monkeypatch.setenv("GATEHOUSE_GRAPHS", "0")
    (found,) = [row for row in typed("doctor", "--json").json()["data"] if row["check"] == "engine"]
    assert (found["state"], found["found"]) == ("note", "graphs is switched off: models run more slowly")


def test_doctor_says_with_a_gpu_what_is_missing_to_launch_kernels(
    typed: Any, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = VisibleGpu("Card", 2**30, (9, 0))
    monkeypatch.setattr(visible_gpu, "first_visible_gpu", lambda: (gpu, ""))
    for compiler, state in (("false", "wrong"), ("true", "ok")):
        monkeypatch.setenv("CC", compiler)
        rows = typed("doctor", "--json").json()["data"]
        assert [row["state"] for row in rows if row["check"] == "compiler"] == [state]


@contextmanager
def running_elsewhere(data_dir: Path) -> Iterator[None]:
    """Hold the database as an appliance does whose own data folder is another one."""

    async def claim() -> DatabaseClaim:
        return await claim_database(f"sqlite:///{data_dir}/gatehouse.db")

    held = asyncio.run(claim())
    try:
        yield
    finally:
        asyncio.run(held.release())


@pytest.mark.parametrize(
    "change",
    [("tenants", "create", "Acme"), ("db", "upgrade"), ("db", "downgrade", "base", "--yes"), ("db", "rebuild-rollups")],
    ids=" ".join,
)
def test_a_change_to_the_database_of_an_appliance_that_runs_elsewhere_is_refused(
    change: tuple[str, ...], typed: Any, data_dir: Path
) -> None:
    with running_elsewhere(data_dir):
        refused = typed(*change, "--json")

        error = refused.json()["error"]
        assert (refused.status, error["code"]) == (1, "running")
        assert "Run the command where the appliance runs, with its --data-dir" in error["message"]
        assert typed("tenants", "list", "--json").json()["data"] == []


def test_commands_change_a_database_at_the_same_time(typed: Any, data_dir: Path) -> None:
    async def claim() -> DatabaseClaim:
        return await claim_database(f"sqlite:///{data_dir}/gatehouse.db", shared=True)

    other = asyncio.run(claim())
    assert typed("tenants", "create", "Acme").status == 0
    asyncio.run(other.release())
