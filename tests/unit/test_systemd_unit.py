"""The systemd unit agrees with the settings, the command line, the shutdown and the guide."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from configparser import RawConfigParser
from pathlib import Path

import pytest
from steps.command_line import _parser

from appliance import app
from appliance.api import http_server
from appliance.base.settings import ENVIRONMENT_PREFIX, Settings, load_settings
from appliance.metering.ledger import writer
from appliance.serving import supervisor
from appliance.serving.alerting import delivery
from tests.support.parsed_commands import parsed_command

REPO = Path(__file__).resolve().parents[2]
UNIT = REPO / "installer" / "units" / "gatehouse.service"
CLONE, STATE, CACHE = "/opt/gatehouse", "/var/lib/gatehouse", "/var/cache/gatehouse"
# Each hides a GPU or /proc from the service, or forbids what a compiler of kernels does.
HARMFUL = {
    "PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock", "MemoryDenyWriteExecute", "NoExecPaths", "ProcSubset",
    "PrivateNetwork", "DynamicUser", "SystemCallFilter",
}  # fmt: skip
STOP_S = {
    "HTTP connections are closed": http_server.CLOSE_TIMEOUT_S,
    "requests are settled": app.SETTLE_TIMEOUT_S,
    "alerts on their way are sent": delivery.STOP_TIMEOUT_S,
    "engines end": supervisor.EXIT_GRACE_S,
    "the ledger is written": writer.STOP_TIMEOUT_S,
}


def unit() -> RawConfigParser:
    """Return the unit; of a key that is repeated, the last value."""
    parser = RawConfigParser(strict=False, comment_prefixes=("#",), delimiters=("=",))
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    parser.read_string(UNIT.read_text("utf-8"))
    return parser


def environment() -> dict[str, str]:
    pairs = re.findall(r"^Environment=(\w+)=(.*)$", UNIT.read_text("utf-8"), re.MULTILINE)
    return dict(pairs)


def guide() -> str:
    text = (REPO / "docs" / "operations.md").read_text("utf-8")
    return text.partition("\n## As a systemd service\n")[2].partition("\n## ")[0]


def commands() -> list[list[str]]:
    """Return the commands of the guide, in code blocks and tables, as words."""
    lines = re.findall(r"^ {7,}(\S.*)$|`(sudo [^`\n]*)`", guide(), re.MULTILINE)
    return [shlex.split(in_block or in_table) for in_block, in_table in lines]


def test_the_unit_starts_a_command_that_exists() -> None:
    program, *words = shlex.split(unit()["Service"]["ExecStart"])
    assert program == f"{CLONE}/.venv/bin/gatehouse"
    assert parsed_command(words) == "serve"


def test_the_unit_sets_settings_that_exist() -> None:
    names = [name for name in environment() if name.startswith(ENVIRONMENT_PREFIX)]
    assert names
    assert {name.removeprefix(ENVIRONMENT_PREFIX).lower() for name in names} <= set(Settings.__dataclass_fields__)


def test_the_service_may_write_its_data_and_its_cache_and_nothing_else() -> None:
    service = unit()["Service"]
    assert (service["User"], service["ProtectSystem"], service["UMask"]) == ("gatehouse", "strict", "0077")
    assert f"/var/lib/{service['StateDirectory']}" == environment()["GATEHOUSE_DATA_DIR"] == STATE
    assert f"/var/cache/{service['CacheDirectory']}" == environment()["HOME"] == CACHE
    assert "ReadWritePaths" not in service


def test_a_stop_has_time_to_drain_and_to_settle(tmp_path: Path) -> None:
    drain_s = load_settings(options={"data_dir": tmp_path}, environ={}).drain_timeout_s
    margin_s = int(unit()["Service"]["TimeoutStopSec"]) - drain_s
    assert margin_s > sum(STOP_S.values())
    assert f"exceed `drain_timeout_s` by {margin_s:.0f} s" in guide()


def test_a_stop_reaches_the_engines_only_through_the_gateway() -> None:
    assert unit()["Service"]["KillMode"] == "mixed"


def test_wrong_options_are_not_tried_again() -> None:
    service = unit()["Service"]
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("on-failure", "2")


def test_the_guide_says_when_a_failed_start_is_tried_again() -> None:
    start = unit()["Unit"]
    assert (start["StartLimitBurst"], start["StartLimitIntervalSec"]) == ("10", "10min")
    assert f"started again after {unit()['Service']['RestartSec']} s, ten times in ten minutes at most" in guide()


def test_nothing_hides_the_gpu_or_forbids_compilation() -> None:
    assert not HARMFUL & set(unit()["Service"])


def test_the_unit_does_not_wait_for_a_notification_that_nobody_sends() -> None:
    senders = [path for path in (REPO / "appliance").rglob("*.py") if "NOTIFY_SOCKET" in path.read_text("utf-8")]
    assert not senders
    assert unit()["Service"]["Type"] == "exec"


def test_the_guide_names_the_user_and_the_folders_of_the_unit() -> None:
    text = guide()
    for name in (f"useradd --system --home-dir {CACHE}", CLONE, STATE, CACHE, "/etc/gatehouse/environment", UNIT.name):
        assert name in text
    assert unit()["Service"]["EnvironmentFile"] == "-/etc/gatehouse/environment"


def test_the_commands_of_the_guide_exist() -> None:
    programs = f"{CLONE}/installer", f"{CLONE}/.venv/bin/gatehouse"
    installs, typed = ([words[words.index(program) + 1 :] for words in commands() if program in words] for program in programs)
    assert installs
    assert typed
    for words in installs:
        assert _parser().parse_args(words).data_dir == STATE
    for words in typed:
        parsed_command(words)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    installed = tmp_path / UNIT.name  # systemd also checks that the program exists
    installed.write_text(UNIT.read_text("utf-8").replace(f"{CLONE}/.venv/bin/gatehouse", "/bin/true"), "utf-8")
    answer = subprocess.run(["systemd-analyze", "verify", str(installed)], capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")
