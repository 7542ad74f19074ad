"""Commands of `gatehouse` on a stopped appliance: help, usage errors, output for people and as JSON, and exit status."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from appliance.base.clock import SystemClock
from appliance.base.db import Database
from appliance.base.version import current_version
from appliance.cli import model_store
from appliance.serving.model_builder import DEMO_MODEL
from appliance.tenancy.admin_tokens import AdminTokens
from appliance.tenancy.members import Member, Members
from appliance.tenancy.pages import PAGE_ROWS_DEFAULT
from engine import visible_gpu
from engine.visible_gpu import VisibleGpu
from tests.support.typed_commands import Run

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
def gatehouse(run_command: Run) -> Run:
    return run_command


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_arguments_in_capitals_and_a_json_option(command: list[str], gatehouse: Any) -> None:
    answer = gatehouse(*command, "--help")
    prefix = f"Usage: gatehouse {' '.join(command)}"
    assert answer.status == 0
    assert answer.out.startswith(prefix)
    arguments = answer.out.partition("\n")[0].removeprefix(prefix)
    assert arguments == arguments.upper()
    assert ("--json" in answer.out) == (command[0] not in WITHOUT_JSON)


@pytest.mark.parametrize("group", ["", *sorted({command[0] for command in COMMANDS if len(command) > 1})])
def test_no_command_summary_is_truncated_at_80_columns(group: str, gatehouse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    summaries = gatehouse(*group.split(), "--help").out.partition("Commands:\n")[2].splitlines()
    assert summaries
    assert [line for line in summaries if line.endswith("...") or not line.endswith(".")] == []


def test_printing_the_version_imports_no_large_library() -> None:
    program = (
        "import sys; from appliance.cli.main import main; main(['version']); "
        "print(sorted({'typer', 'rich', 'litestar', 'sqlalchemy', 'httpx', 'torch'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines() == [f"gatehouse {current_version()}", "[]"]


def test_the_version_option_prints_the_version(gatehouse: Any) -> None:
    version = f"gatehouse {current_version()}\n"
    assert (gatehouse("--version").out, gatehouse("--version", "tenants").out) == (version, version)


@pytest.mark.parametrize("command", [[], ["tenants"], ["tenants", "create"]], ids=" ".join)
def test_the_short_option_h_shows_the_help(command: list[str], gatehouse: Any) -> None:
    assert gatehouse(*command, "-h").out == gatehouse(*command, "--help").out != ""


def test_without_a_command_the_help_is_shown(gatehouse: Any) -> None:
    answer = gatehouse()
    assert answer.status == 2
    assert "Commands:" in answer.err


def test_an_unknown_command_is_a_usage_error(gatehouse: Any) -> None:
    assert gatehouse("tennants").status == 2


def test_with_the_json_option_usage_errors_are_json(gatehouse: Any) -> None:
    answer = gatehouse("tenants", "create", "--json")
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
def test_invalid_arguments_exit_with_2_and_print_only_to_stderr(gatehouse: Any, command: list[str]) -> None:
    answer = gatehouse(*command)
    assert (answer.status, answer.out) == (2, "")
    assert answer.err


def test_an_invalid_setting_is_named(gatehouse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEHOUSE_PORT", "many")
    answer = gatehouse("tenants", "list")
    assert answer.status == 1
    assert "GATEHOUSE_PORT" in answer.err


@pytest.mark.parametrize("option", ["--data-dir", "--data-dir=somewhere", "--database", "--json"])
def test_an_option_before_the_command_is_refused_with_advice(gatehouse: Any, option: str) -> None:
    answer = gatehouse(option, "somewhere", "doctor")
    name = option.partition("=")[0]
    assert answer.status == 2
    assert f"{name} must come after the command" in answer.out + answer.err


def test_an_unknown_setting_stops_the_command(gatehouse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEHOUSE_PROT", "8000")
    assert gatehouse("tenants", "list", "--json").json()["error"]["code"] == "invalid_setting"


@pytest.mark.parametrize(
    "command", [["tenants", "list"], ["prices", "list"], ["usage"], ["db", "check"], ["audit", "verify"]], ids=" ".join
)
def test_reading_commands_create_no_appliance(gatehouse: Any, tmp_path: Path, command: list[str]) -> None:
    nowhere = tmp_path / "typo"
    answer = gatehouse(*command, "--data-dir", str(nowhere), "--json")
    assert (answer.status, answer.json()["error"]["code"]) == (1, "no_appliance")
    assert str(nowhere) in answer.json()["error"]["message"]
    assert "--data-dir" in answer.json()["error"]["message"]
    assert not nowhere.exists()


@pytest.mark.parametrize(
    "command", [["tenants", "list"], ["db", "check"], ["db", "upgrade"], ["admin", "token", "--list"]], ids=" ".join
)
def test_an_unreachable_database_is_reported_without_its_password(gatehouse: Any, command: list[str]) -> None:
    answer = gatehouse(*command, "--database", "postgresql://u:hunter2@127.0.0.1:1/db", "--json")
    assert answer.status == 1
    assert answer.json()["error"]["code"] == "database"
    assert "hunter2" not in answer.out + answer.err


def test_an_unusable_data_folder_is_reported(gatehouse: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    below = gatehouse("serve", "--data-dir", str(tmp_path / "file" / "data"))
    assert below.status == 1
    assert "choose another folder with --data-dir" in below.err
    itself = gatehouse("tenants", "list", "--data-dir", str(tmp_path / "file"), "--json")
    assert itself.status == 2
    assert itself.json()["error"]["code"] == "invalid_setting"


def test_a_tenant_is_created_changed_shown_and_archived(gatehouse: Any) -> None:
    made = gatehouse("tenants", "create", "bob", "--tokens-per-minute", "1000", "--model", "demo", "--json").json()
    assert made["limits"]["tokens_per_minute"] == 1000
    assert made["allowed_models"] == ["demo"]
    changed = gatehouse(
        "tenants", "update", "bob", "--tokens-per-minute", "none", "--model", "all", "--suspend", "--json"
    ).json()
    assert (changed["limits"]["tokens_per_minute"], changed["allowed_models"], changed["suspended"]) == (None, None, True)
    assert gatehouse("tenants", "show", made["id"], "--json").json() == changed
    assert gatehouse("tenants", "archive", "bob", "--yes", "--json").json()["archived"] is True
    assert gatehouse("tenants", "list", "--json").json() == {"data": []}
    assert [row["name"] for row in gatehouse("tenants", "list", "--archived", "--json").json()["data"]] == ["bob"]


def test_a_taken_name_is_refused_with_the_error_code_of_the_api(gatehouse: Any) -> None:
    gatehouse("tenants", "create", "bob")
    answer = gatehouse("tenants", "create", "bob", "--json")
    assert answer.status == 1
    assert answer.json()["error"]["code"] == "name_taken"


def test_an_update_without_changes_is_a_usage_error(gatehouse: Any) -> None:
    gatehouse("tenants", "create", "bob")
    assert gatehouse("tenants", "update", "bob").status == 2


@pytest.mark.parametrize("value", ["many", "-5", "1.5", "", "99999999999999999999", "1000000000000001"])
def test_an_invalid_limit_is_a_usage_error(gatehouse: Any, value: str) -> None:
    assert gatehouse("tenants", "create", "bob", "--tokens-per-day", value).status == 2


def test_creating_a_key_for_an_unknown_tenant_fails(gatehouse: Any) -> None:
    answer = gatehouse("keys", "create", "charlie")
    assert answer.status == 1
    assert "charlie" in answer.err


def test_listing_keys_of_an_empty_tenant_name_fails(gatehouse: Any) -> None:
    gatehouse("tenants", "create", "bob")
    gatehouse("keys", "create", "bob")

    assert gatehouse("keys", "list", "--tenant", "", "--json").status == 1


def test_a_key_is_created_with_its_secret_shown_once_rotated_and_revoked(gatehouse: Any) -> None:
    gatehouse("tenants", "create", "bob")
    made = gatehouse("keys", "create", "bob", "--name", "laptop", "--network", "10.0.0.0/8", "--json").json()
    assert made["key"].startswith(made["prefix"])
    assert made["allowed_networks"] == ["10.0.0.0/8"]
    listed = gatehouse("keys", "list", "--tenant", "bob", "--json")
    assert listed.json()["data"][0]["tenant"] == "bob"
    assert made["key"] not in listed.out
    fresh = gatehouse("keys", "rotate", made["prefix"], "--json").json()
    assert fresh["key"] != made["key"]
    revoked = gatehouse("keys", "revoke", fresh["id"], "--json").json()
    assert revoked["revoked_at"] is not None
    assert gatehouse("keys", "revoke", "nothing").status == 1


def test_piped_output_is_tab_separated_with_a_header(gatehouse: Any) -> None:
    gatehouse("tenants", "create", "bob")
    lines = gatehouse("tenants", "list").out.splitlines()
    assert lines[0].split("\t")[:2] == ["id", "name"]
    assert lines[1].split("\t")[1] == "bob"


def test_usage_of_an_idle_appliance_is_empty(gatehouse: Any) -> None:
    assert gatehouse("usage", "--json").json() == {"data": []}
    assert gatehouse("usage", "--group-by", "model").out.startswith("start\tmodel\t")


def test_usage_can_be_filtered_by_key_and_model(gatehouse: Any) -> None:
    gatehouse("tenants", "create", "bob")
    made = gatehouse("keys", "create", "bob", "--json").json()
    assert gatehouse("usage", "--key", made["prefix"], "--model", "demo", "--model", "other", "--json").json() == {"data": []}
    assert "no key" in gatehouse("usage", "--key", "gh_nothing").err


def test_usage_grouped_by_several_columns_shows_each(gatehouse: Any) -> None:
    assert gatehouse("usage", "--group-by", "tenant,key").out.startswith("start\ttenant\tkey_id\trequests\t")


def test_the_audit_log_can_be_filtered_by_tenant_name(gatehouse: Any) -> None:
    made = gatehouse("tenants", "create", "dora", "--json").json()
    entries = gatehouse("audit", "list", "--tenant", "dora", "--json").json()["data"]
    assert [(entry["action"], entry["tenant_id"]) for entry in entries] == [("tenant.create", made["id"])]
    assert "no tenant 'nobody'" in gatehouse("audit", "list", "--tenant", "nobody").err


def test_a_member_is_created_and_password_second_factor_and_provider_reset(gatehouse: Any) -> None:
    made = gatehouse("admin", "create", "alice@example.com", "--role", "owner", "--json").json()
    assert made["role"] == "owner"
    renewed = gatehouse("admin", "reset-password", "alice@example.com", "--json").json()
    assert renewed["password"] != made["password"]
    assert gatehouse("admin", "reset-password", "nobody@example.com").status == 1
    for command in ("reset-second-factor", "unlink-provider"):
        assert gatehouse("admin", command, "Alice@example.com", "--json").json()["id"] == made["id"]
        assert gatehouse("admin", command, "nobody@example.com").status == 1
    assert gatehouse("admin", "create", "alice@example.com", "--json").json()["error"]["code"] == "name_taken"


def test_the_temporary_option_makes_a_password_temporary(gatehouse: Any, data_dir: Path) -> None:
    async def find_alice() -> Member:
        async with Database.open(f"sqlite:///{data_dir / 'gatehouse.db'}") as database:
            return await Members(database, SystemClock()).get_by_email("alice@example.com")

    for command in "create", "reset-password":
        answer = gatehouse("admin", command, "alice@example.com", "--temporary")
        assert (answer.status, "must be replaced at the next sign-in" in answer.err) == (0, True)
        assert asyncio.run(find_alice()).password_temporary
        gatehouse("admin", "reset-password", "alice@example.com")
        assert not asyncio.run(find_alice()).password_temporary
    for path in ("admin", "create"), ("members", "invite"):
        assert "emporary" in gatehouse(*path, "--help").out


@pytest.mark.parametrize("command", ["create", "reset-password"])
def test_a_password_from_standard_input_is_noted_as_temporary_if_it_is(command: str, gatehouse: Any) -> None:
    gatehouse("admin", "create", "dora@example.com")
    address = "dora@example.com" if command == "reset-password" else "emil@example.com"
    arguments = ("admin", command, address, "--password-stdin")
    for options, note in (("--temporary",), "The password is temporary and must be replaced at the next sign-in.\n"), ((), ""):
        answer = gatehouse(*arguments, *options, piped="a password that is long\n")
        assert (answer.status, answer.err) == (0, note)
        arguments = ("admin", "reset-password", *arguments[2:])


def test_a_password_from_stdin_is_not_printed(gatehouse: Any) -> None:
    answer = gatehouse("admin", "create", "alice@example.com", "--password-stdin", piped="correct horse battery\n")
    assert (answer.status, "correct horse" in answer.out) == (0, False)


def test_all_tokens_are_listed_across_pages(gatehouse: Any, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def create() -> None:
        database = Database.open(f"sqlite:///{data_dir / 'gatehouse.db'}")
        for number in range(PAGE_ROWS_DEFAULT + 1):
            await AdminTokens(database, SystemClock()).create(f"token {number}", "viewer")
        await database.close()

    asyncio.run(create())
    for page_rows in (PAGE_ROWS_DEFAULT, 1000):
        monkeypatch.setattr("appliance.tenancy.pages.PAGE_ROWS_MAX", page_rows)
        assert len(gatehouse("admin", "token", "--list", "--json").json()["data"]) == PAGE_ROWS_DEFAULT + 1


def test_an_administrator_token_is_printed_once_and_can_be_revoked(gatehouse: Any) -> None:
    made = gatehouse("admin", "token", "ci", "--role", "viewer", "--json").json()
    listed = gatehouse("admin", "token", "--list", "--json")
    assert made["token"] not in listed.out
    assert gatehouse("admin", "token", "--revoke", made["id"], "--json").json()["revoked_at"] is not None
    assert gatehouse("admin", "token").status == 2
    for verb in ("create", "list", "revoke"):  # verbs as with keys must not become names of new tokens
        assert gatehouse("admin", "token", verb, "--json").status == 2


@pytest.mark.parametrize(
    "command",
    [["keys", "create", "bob", "--expires-at", ""], ["usage", "--start", ""], ["usage", "--end", ""]],
    ids=lambda command: " ".join(command[:-1]),
)
def test_an_empty_time_is_refused_and_not_treated_as_missing(gatehouse: Any, command: list[str]) -> None:
    gatehouse("tenants", "create", "bob")
    refused = gatehouse(*command, "--json")

    assert (refused.status, refused.json()["error"]["code"]) == (2, "invalid_value")


def test_budgets_are_shown_with_their_unit_in_help_and_output(gatehouse: Any) -> None:
    for command in (["tenants", "create"], ["tenants", "update"], ["keys", "create"], ["keys", "update"], ["limits", "model"]):
        explained = " ".join(re.sub(r"[^\w.]+", " ", gatehouse(*command, "--help").out).split())
        assert "5000000 is 5.00 EUR" in explained
        assert ("a budget in millionths of the currency" in explained) == (command[0] != "limits")
    budget = ("--monthly-budget", "2500000")
    assert "monthly_budget=2.500000 CHF" in gatehouse("tenants", "create", "bob", "--currency", "CHF", *budget).out
    assert "monthly_budget=0.000100 CHF" in gatehouse("tenants", "update", "bob", "--monthly-budget", "100").out
    key = gatehouse("keys", "create", "bob", "--json").json()
    assert "monthly_budget=2.500000 CHF" in gatehouse("keys", "update", key["id"], *budget).out
    assert "monthly_budget=2.500000 EUR" in gatehouse("limits", "model", "demo", *budget).out
    assert "monthly_budget=2.500000 EUR" in gatehouse("limits", "models").out
    limited = gatehouse("tenants", "update", "bob", "--model-limit", "demo:monthly_budget=100").out
    assert "demo=monthly_budget=0.000100 CHF" in limited
    assert gatehouse("tenants", "show", "bob", "--json").json()["limits"]["monthly_budget"] == 100


def test_commands_before_the_first_start_create_no_administrator(gatehouse: Any, data_dir: Path) -> None:
    (data_dir / "gatehouse.db").unlink()
    gatehouse("tenants", "list")
    gatehouse("admin", "token", "--list")
    assert gatehouse("admin", "create", "admin@localhost").status == 0, "an earlier command created the first administrator"


@pytest.mark.usefixtures("verify_in_process")
def test_a_folder_without_a_model_is_refused_with_the_reason(gatehouse: Any, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    answer = gatehouse("models", "verify", str(tmp_path / "model"), "--json")
    assert answer.status == 1
    assert answer.json()["error"]["code"] == "not_a_model"
    assert "has no config.json" in answer.json()["error"]["message"]
    assert gatehouse("models", "add", str(tmp_path / "model")).status == 1


@pytest.mark.usefixtures("verify_in_process")
def test_an_unknown_quantization_is_refused_with_the_supported_ones(gatehouse: Any) -> None:
    answer = gatehouse("models", "verify", str(DEMO_MODEL), "--quantization", "int3", "--json")
    assert answer.status == 2
    assert answer.json()["error"]["code"] == "invalid_option"
    assert "supported here: int8, fp8" in answer.json()["error"]["message"]


def test_only_added_models_can_be_removed(gatehouse: Any, data_dir: Path) -> None:
    answer = gatehouse("models", "remove", "gatehouse-demo")
    assert answer.status == 1
    assert answer.err == "gatehouse: there is no added model named 'gatehouse-demo'; no model has been added\n"
    model_store.link(DEMO_MODEL, model_store.new_model_path("tiny", data_dir))
    assert gatehouse("models", "remove", "tinny").err.endswith("named 'tinny'; did you mean 'tiny'?\n")
    assert gatehouse("models", "remove", "other").err.endswith("named 'other'; the added models are tiny\n")
    assert gatehouse("models", "remove", "tiny").status == 0


def test_a_mistyped_model_gets_the_closest_name_as_suggestion(gatehouse: Any, data_dir: Path) -> None:
    for command in ("models", "verify"), ("serve", "--model"):
        answer = gatehouse(*command, "gatehouse-dmeo")
        assert answer.status == 1
        assert answer.err.endswith("; did you mean 'gatehouse-demo'?\n")
    answer = gatehouse("models", "add", f"{DEMO_MODEL}x")
    assert answer.status == 1
    assert answer.err.endswith(f"; did you mean {str(DEMO_MODEL)!r}?\n")


@pytest.mark.usefixtures("skip_tensor_check")
def test_doctor_reports_parts_of_the_engine_that_are_switched_off(
    gatehouse: Any, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "engine" not in [row["check"] for row in gatehouse("doctor", "--json").json()["data"]]
    monkeypatch.setenv("GATEHOUSE_GRAPHS", "0")
    (found,) = [row for row in gatehouse("doctor", "--json").json()["data"] if row["check"] == "engine"]
    assert (found["state"], found["found"]) == ("note", "graphs is switched off: models run more slowly")


@pytest.mark.usefixtures("skip_tensor_check")
def test_with_a_gpu_doctor_reports_a_missing_compiler(gatehouse: Any, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = VisibleGpu("Card", 2**30, (9, 0))
    monkeypatch.setattr(visible_gpu, "first_visible_gpu", lambda: (gpu, ""))
    for compiler, state in (("false", "wrong"), ("true", "ok")):
        monkeypatch.setenv("CC", compiler)
        rows = gatehouse("doctor", "--json").json()["data"]
        assert [row["state"] for row in rows if row["check"] == "compiler"] == [state]
