"""The command line with a running appliance: commands take effect immediately; output and failures of `gatehouse serve`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked_processes
from tests.support.polling import block_until
from tests.support.served_model import make_hollow_model
from tests.support.server import Server

GREETING_DEADLINE_S = 300.0
LAST_LINE = "Ctrl-C drains and stops."
Command = Callable[..., "subprocess.CompletedProcess[str]"]


def environment(data_dir: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GATEHOUSE_")}
    return {**kept, "GATEHOUSE_DATA_DIR": str(data_dir), "GATEHOUSE_KV_CACHE_BYTES": "16MiB", "GATEHOUSE_ENGINE_THREADS": "1"}


def run_gatehouse(data_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end in a forked process."""
    with tempfile.TemporaryDirectory() as name:
        stdout, stderr = Path(name, "stdout"), Path(name, "stderr")
        program = ("tests.support.serve_for_tests", "run_command", arguments, environment(data_dir), stdout, stderr)
        status = forked_processes.wait_for_exit(forked_processes.start(*program), GREETING_DEADLINE_S)
        return subprocess.CompletedProcess(arguments, status, stdout.read_text("utf-8"), stderr.read_text("utf-8"))


@pytest.fixture
def gatehouse(server: Server) -> Command:
    """Run a command with the data folder of the running appliance."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_gatehouse(server.data_dir, *arguments)

    return run


def parsed(answer: subprocess.CompletedProcess[str]) -> Any:
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return json.loads(answer.stdout)


def chat_status(server: Server, key: str) -> int:
    body = {"model": "tiny-llama", "max_tokens": 2, "ignore_eos": True, "messages": [{"role": "user", "content": "fox"}]}
    return server.chat(body, key=key).status_code


def test_created_and_revoked_keys_take_effect_when_the_command_returns(gatehouse: Command, server: Server) -> None:
    tenant = parsed(gatehouse("tenants", "create", "from the command line", "--json"))
    key = parsed(gatehouse("keys", "create", tenant["id"], "--json"))
    assert chat_status(server, key["key"]) == 200
    parsed(gatehouse("keys", "revoke", key["id"], "--json"))
    assert chat_status(server, key["key"]) == 401


def test_usage_and_ledger_check_include_served_requests(gatehouse: Command, server: Server) -> None:
    tenant_id, key = server.new_key()
    assert chat_status(server, key) == 200
    (row,) = parsed(gatehouse("usage", "--tenant", tenant_id, "--json"))["data"]
    assert (row["requests"], row["completion_tokens"]) == (1, 2)
    checked = parsed(gatehouse("db", "check", "--json"))
    assert checked["ok"] is True


def test_models_of_the_running_appliance_are_listed_with_state_and_quantization(gatehouse: Command) -> None:
    def ready() -> bool:  # the list is from the last sample, at most a second old
        rows = {row["name"]: row for row in parsed(gatehouse("models", "list", "--json"))["data"]}
        return (rows["tiny-llama"]["state"], rows["tiny-llama"]["quantization"]) == ("ready", "none")

    block_until(ready)


def test_doctor_reports_a_running_appliance_as_ok(gatehouse: Command, server: Server) -> None:
    states = {row["check"]: (row["state"], row["found"]) for row in parsed(gatehouse("doctor", "--json"))["data"]}
    assert states["appliance"][0] == "ok"
    assert server.url in states["appliance"][1]
    assert states["ready"][0] == "ok"


def test_a_downgrade_is_refused_while_the_appliance_runs(gatehouse: Command) -> None:
    answer = gatehouse("db", "downgrade", "base", "--yes", "--json")
    assert answer.returncode == 1
    assert json.loads(answer.stdout)["error"]["code"] == "running"


def serve_to_its_end(model: Path, data_dir: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `gatehouse serve` until it exits by itself."""
    return run_gatehouse(data_dir, "serve", "--port", "0", "--model", str(model), "--device", "cpu", *options)


def test_serve_exits_with_the_reason_if_its_only_model_cannot_be_loaded(tmp_path: Path, data_dir: Path) -> None:
    model = make_hollow_model(tmp_path / "hollow")
    ended = serve_to_its_end(model, data_dir)
    assert ended.returncode == 1, ended.stderr
    printed = [line for line in ended.stderr.splitlines() if line.startswith("gatehouse: ")]
    assert len(printed) == 1, ended.stderr
    assert printed[0].startswith("gatehouse: the model hollow could not be loaded: ")
    assert "Password" in ended.stdout, "the login of the first start was not shown"
    assert "is ready" not in ended.stdout
    assert not (data_dir / "control.json").exists()


@pytest.mark.parametrize(
    "option",
    [
        ("--database", "postgresql://alice:hush@127.0.0.1:1/gatehouse"),
        ("--host", "192.0.2.1"),
        ("--model", "no-such-model"),
    ],
    ids=lambda option: option[0],
)
def test_a_refused_start_prints_one_line_and_leaves_no_files(
    served_folder: Path, data_dir: Path, option: tuple[str, str]
) -> None:
    ended = serve_to_its_end(served_folder, data_dir, *option)
    assert ended.returncode == 1
    (printed,) = ended.stderr.splitlines()
    assert printed.startswith("gatehouse: ")
    assert "hush" not in printed
    assert not data_dir.exists()


def test_a_refused_second_start_leaves_the_files_of_the_running_appliance(server: Server, served_folder: Path) -> None:
    ended = serve_to_its_end(served_folder, server.data_dir)
    assert ended.returncode == 1
    assert "another Gatehouse" in ended.stderr
    assert {"gatehouse.db", "gatehouse.lock", "secret.key", "control.json"} <= {path.name for path in server.data_dir.iterdir()}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def start_serve(served_folder: Path, data_dir: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Return a function that starts `gatehouse serve` as an operator does."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "appliance.cli.main",
                "serve",
                "--port",
                "0",
                "--model",
                str(served_folder),
                "--device",
                "cpu",
            ],
            cwd=forked_processes.REPOSITORY,
            env=environment(data_dir),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def greeting(process: subprocess.Popen[str]) -> list[str]:
    """Return the lines that `serve` prints up to its greeting; a process that prints none in time is killed."""
    assert process.stdout is not None
    lines: list[str] = []
    watchdog = threading.Timer(GREETING_DEADLINE_S, process.kill)
    watchdog.start()
    try:
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if lines[-1] == LAST_LINE:
                return lines
    finally:
        watchdog.cancel()
    raise AssertionError(f"no greeting within {GREETING_DEADLINE_S} s: {lines}")


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_the_printed_curl_command_works_and_the_login_is_shown_once(start_serve: Callable[[], subprocess.Popen[str]]) -> None:
    first = start_serve()
    printed = greeting(first)
    (line,) = [line for line in printed if line.startswith("curl ")]
    answer = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False, timeout=60)
    assert answer.stdout.rstrip().endswith("data: [DONE]"), answer
    password = next(line.split()[-1] for line in printed if "Password" in line)
    first.send_signal(signal.SIGINT)
    assert first.wait(60) == 0
    second = start_serve()
    printed = greeting(second)
    assert not any(password in line for line in printed)
    assert any("reset-password" in line for line in printed)
    second.send_signal(signal.SIGTERM)
    assert second.wait(60) == 0
