"""The command line beside a real appliance: it finds it, acts on it at once, and `serve` greets as it promises."""

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

import httpx
import pytest

from tests.support import forked_processes
from tests.support.served_model import make_hollow_model
from tests.support.server import Server, poll_until

GREETING_DEADLINE_S = 300.0
LIST_DEADLINE_S = 60.0
LAST_LINE = "Ctrl-C drains and stops."
Command = Callable[..., "subprocess.CompletedProcess[str]"]


def environment(data_dir: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GATEHOUSE_")}
    return {**kept, "GATEHOUSE_DATA_DIR": str(data_dir), "GATEHOUSE_KV_CACHE_BYTES": "16MiB", "GATEHOUSE_ENGINE_THREADS": "1"}


def typed(data_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end in a process of its own, which is forked: `serve` below is started as an operator would."""
    with tempfile.TemporaryDirectory() as name:
        stdout, stderr = Path(name, "stdout"), Path(name, "stderr")
        program = ("tests.support.serve_for_tests", "run_command", arguments, environment(data_dir), stdout, stderr)
        status = forked_processes.wait_for_exit(forked_processes.start(*program), GREETING_DEADLINE_S)
        return subprocess.CompletedProcess(arguments, status, stdout.read_text("utf-8"), stderr.read_text("utf-8"))


@pytest.fixture
def gatehouse(server: Server) -> Command:
    """Run the command as an operator would, beside the running appliance."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return typed(server.data_dir, *arguments)

    return run


def found(answer: subprocess.CompletedProcess[str]) -> Any:
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return json.loads(answer.stdout)


def ask(server: Server, key: str) -> int:
    body = {"model": "tiny-llama", "max_tokens": 2, "ignore_eos": True, "messages": [{"role": "user", "content": "fox"}]}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60).status_code


def test_a_key_works_and_stops_working_the_moment_the_command_returns(gatehouse: Command, server: Server) -> None:
    tenant = found(gatehouse("tenants", "create", "from the command line", "--json"))
    key = found(gatehouse("keys", "create", tenant["id"], "--json"))
    assert ask(server, key["key"]) == 200
    found(gatehouse("keys", "revoke", key["id"], "--json"))
    assert ask(server, key["key"]) == 401


def test_usage_and_the_check_of_the_ledger_see_what_was_served(gatehouse: Command, server: Server) -> None:
    tenant_id, key = server.new_key()
    assert ask(server, key) == 200
    (row,) = found(gatehouse("usage", "--tenant", tenant_id, "--json"))["data"]
    assert (row["requests"], row["completion_tokens"]) == (1, 2)
    checked = found(gatehouse("db", "check", "--json"))
    assert checked["ok"] is True


def test_the_models_of_the_running_appliance_are_listed(gatehouse: Command) -> None:
    def ready() -> bool:  # the list comes from the system page, which is a second old at most
        rows = {row["name"]: row for row in found(gatehouse("models", "list", "--json"))["data"]}
        return (rows["tiny-llama"]["state"], rows["tiny-llama"]["quantization"]) == ("ready", "none")

    poll_until(ready, LIST_DEADLINE_S)


def test_doctor_finds_the_running_appliance_in_order(gatehouse: Command, server: Server) -> None:
    states = {row["check"]: (row["state"], row["found"]) for row in found(gatehouse("doctor", "--json"))["data"]}
    assert states["appliance"][0] == "ok"
    assert server.url in states["appliance"][1]
    assert states["ready"][0] == "ok"


def test_the_tables_are_not_touched_while_it_runs(gatehouse: Command) -> None:
    answer = gatehouse("db", "downgrade", "base", "--yes", "--json")
    assert answer.returncode == 1
    assert json.loads(answer.stdout)["error"]["code"] == "running"


def serve_to_its_end(model: Path, data_dir: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `gatehouse serve`, which is expected to give up by itself."""
    return typed(data_dir, "serve", "--port", "0", "--model", str(model), "--device", "cpu", *options)


def test_an_appliance_whose_only_model_cannot_be_loaded_ends_and_says_why(tmp_path: Path, data_dir: Path) -> None:
    model = make_hollow_model(tmp_path / "hollow")
    ended = serve_to_its_end(model, data_dir)
    assert ended.returncode == 1, ended.stderr
    said = [line for line in ended.stderr.splitlines() if line.startswith("gatehouse: ")]
    assert len(said) == 1, ended.stderr
    assert said[0].startswith("gatehouse: the model hollow could not be loaded: ")
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
def test_a_refused_start_says_why_in_one_line_and_leaves_no_trace(
    served_folder: Path, data_dir: Path, option: tuple[str, str]
) -> None:
    ended = serve_to_its_end(served_folder, data_dir, *option)
    assert ended.returncode == 1
    (said,) = ended.stderr.splitlines()
    assert said.startswith("gatehouse: ")
    assert "hush" not in said
    assert not data_dir.exists()


def test_a_refused_start_beside_a_running_appliance_takes_nothing_from_it(server: Server, served_folder: Path) -> None:
    ended = serve_to_its_end(served_folder, server.data_dir)
    assert ended.returncode == 1
    assert "another Gatehouse" in ended.stderr
    assert {"gatehouse.db", "gatehouse.lock", "secret.key", "control.json"} <= {path.name for path in server.data_dir.iterdir()}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def served(served_folder: Path, data_dir: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Start `gatehouse serve` as often as asked, one after the other."""
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
    """Return what `serve` prints up to its last line; a process that never greets is ended, which ends the reading."""
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


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine to try the printed line with")
def test_the_printed_line_works_as_printed_and_the_login_is_shown_once(served: Callable[[], subprocess.Popen[str]]) -> None:
    first = served()
    said = greeting(first)
    (line,) = [line for line in said if line.startswith("curl ")]
    answer = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False, timeout=60)
    assert answer.stdout.rstrip().endswith("data: [DONE]"), answer
    password = next(line.split()[-1] for line in said if "Password" in line)
    first.send_signal(signal.SIGINT)
    assert first.wait(60) == 0
    second = served()
    said = greeting(second)
    assert not any(password in line for line in said)
    assert any("reset-password" in line for line in said)
    second.send_signal(signal.SIGTERM)
    assert second.wait(60) == 0
