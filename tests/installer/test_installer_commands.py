"""The installer run as a command: help, usage errors, and refusals on one line that leave no files."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A minimal clone without a `.venv`, in which an installation would be noticed."""
    folder = tmp_path / "a clone"
    shutil.copytree(REPO / "installer", folder / "installer", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run_installer(clone: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    home = clone.parent / "home"
    home.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GATEHOUSE_", "XDG_"))}
    return subprocess.run(
        [sys.executable, str(clone / "installer"), *arguments],
        cwd=home,
        env={**kept, "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def refusal(answer: subprocess.CompletedProcess[str], clone: Path) -> str:
    """Assert exit status 1, one line on standard error, and unchanged clone and home folders; return the line."""
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert answer.stdout == ""
    assert len(answer.stderr.strip().splitlines()) == 1
    assert {path.name for path in clone.iterdir()} == {"installer"}
    assert not list((clone.parent / "home").iterdir())
    return answer.stderr


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_help_lists_the_available_commands_only(clone: Path) -> None:
    answer = run_installer(clone, "--help")
    assert answer.returncode == 0
    assert all(word in answer.stdout for word in ("up", "test", "doctor"))
    assert not any(word in answer.stdout for word in ("bundle", "upgrade", "rollback", "uninstall"))


def test_help_of_up_lists_every_option(clone: Path) -> None:
    answer = run_installer(clone, "up", "--help")
    assert all(f"--{name}" in answer.stdout for name in ("host", "port", "data-dir", "model", "database", "device"))


def test_help_of_test_needs_no_environment(clone: Path) -> None:
    assert "pytest" in run_installer(clone, "test", "--help").stdout
    assert not (clone / ".venv").exists()


@pytest.mark.parametrize("name", ["install", "bundle", "upgrade", "rollback", "uninstall"])
def test_a_command_of_a_later_version_is_reported_as_not_available(clone: Path, name: str) -> None:
    answer = run_installer(clone, name)
    assert answer.returncode == 2
    assert "not available in this version" in answer.stderr


def test_no_command_is_a_usage_error(clone: Path) -> None:
    assert run_installer(clone).returncode == 2


def test_an_unknown_option_is_a_usage_error(clone: Path) -> None:
    assert run_installer(clone, "up", "--prot", "8000").returncode == 2


def test_a_port_in_use_is_refused_before_installing(clone: Path, taken_port: int) -> None:
    line = refusal(run_installer(clone, "up", "--port", str(taken_port)), clone)
    assert f"Port {taken_port}" in line
    assert f"--port {taken_port + 1}" in line


def test_a_port_in_use_from_the_environment_is_refused(clone: Path, taken_port: int) -> None:
    assert f"Port {taken_port}" in refusal(run_installer(clone, "up", GATEHOUSE_PORT=str(taken_port)), clone)


@pytest.mark.parametrize("port", ["eighty", "-1", "65536"])
def test_an_invalid_port_is_refused(clone: Path, port: str) -> None:
    assert "not a valid port" in refusal(run_installer(clone, "up", f"--port={port}"), clone)


def test_a_host_that_is_not_an_address_of_this_machine_is_refused(clone: Path) -> None:
    assert "not an address of this machine" in refusal(run_installer(clone, "up", "--port", "0", "--host", "192.0.2.1"), clone)


def test_a_missing_model_is_refused(clone: Path) -> None:
    line = refusal(run_installer(clone, "up", "--port", "0", "--model", "nowhere/model"), clone)
    assert "nowhere/model" in line


def test_a_folder_that_is_no_model_is_refused_with_the_missing_files(clone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    line = refusal(run_installer(clone, "up", "--port", "0", "--model", str(folder)), clone)
    assert "tokenizer.json" in line
    assert "safetensors" in line
    assert "no config.json" not in line


def test_a_data_folder_below_a_file_is_refused(clone: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "--data-dir" in refusal(
        run_installer(clone, "up", "--port", "0", "--data-dir", str(tmp_path / "file" / "data")), clone
    )


def test_an_unsupported_database_is_refused_without_its_password(clone: Path) -> None:
    line = refusal(run_installer(clone, "up", "--port", "0", "--database", "mysql://root:hunter2@db/x"), clone)
    assert "postgresql://" in line
    assert "hunter2" not in line


def test_a_settings_file_that_is_not_toml_is_refused(clone: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "gatehouse.toml").write_text("port: 8000")
    assert "gatehouse.toml" in refusal(run_installer(clone, "up", "--data-dir", str(data)), clone)


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="this machine has an NVIDIA GPU")
def test_device_cuda_without_a_gpu_is_refused(clone: Path) -> None:
    assert "requires an NVIDIA driver" in refusal(run_installer(clone, "up", "--port", "0", "--device", "cuda"), clone)


def test_an_environment_of_another_origin_is_not_touched(clone: Path) -> None:
    (clone / ".venv").mkdir()
    (clone / ".venv" / "mine").write_text("precious")
    answer = run_installer(clone, "up", "--port", "0")
    assert answer.returncode == 1
    assert "not created by this installer" in answer.stderr
    assert (clone / ".venv" / "mine").read_text() == "precious"


def test_doctor_without_an_installation_says_what_to_do(clone: Path) -> None:
    answer = run_installer(clone, "doctor")
    assert answer.returncode == 1
    assert "python3 installer up" in answer.stdout


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="this machine has an NVIDIA GPU")
def test_without_a_gpu_doctor_does_not_mention_cuda(clone: Path) -> None:
    answer = run_installer(clone, "doctor")
    assert "cuda" not in (answer.stdout + answer.stderr).lower()
