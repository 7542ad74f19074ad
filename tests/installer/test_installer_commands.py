"""The installer as a person starts it: what it refuses, in one clear line, and that nothing is left behind."""

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
    """A clone as small as the installer needs: no `.venv`, and installing into it would be seen."""
    folder = tmp_path / "a clone"
    shutil.copytree(REPO / "installer", folder / "installer", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def start(clone: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
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


def refused(answer: subprocess.CompletedProcess[str], clone: Path) -> str:
    """Assert exit status 1, one line, no traceback, and a clone and home as empty as before; return the line."""
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


def test_help_names_the_commands_that_exist_and_no_others(clone: Path) -> None:
    answer = start(clone, "--help")
    assert answer.returncode == 0
    assert all(word in answer.stdout for word in ("up", "test", "doctor"))
    assert not any(word in answer.stdout for word in ("bundle", "upgrade", "rollback", "uninstall"))


def test_every_option_of_up_is_in_its_help(clone: Path) -> None:
    answer = start(clone, "up", "--help")
    assert all(f"--{name}" in answer.stdout for name in ("host", "port", "data-dir", "model", "database", "device"))


def test_help_of_test_needs_no_environment(clone: Path) -> None:
    assert "pytest" in start(clone, "test", "--help").stdout
    assert not (clone / ".venv").exists()


@pytest.mark.parametrize("name", ["install", "bundle", "upgrade", "rollback", "uninstall"])
def test_a_command_of_a_later_version_says_so(clone: Path, name: str) -> None:
    answer = start(clone, name)
    assert answer.returncode == 2
    assert "not available in this version" in answer.stderr


def test_no_command_is_a_usage_error(clone: Path) -> None:
    assert start(clone).returncode == 2


def test_an_unknown_option_is_a_usage_error(clone: Path) -> None:
    assert start(clone, "up", "--prot", "8000").returncode == 2


def test_a_port_in_use_is_told_before_anything_is_installed(clone: Path, taken_port: int) -> None:
    line = refused(start(clone, "up", "--port", str(taken_port)), clone)
    assert f"Port {taken_port}" in line
    assert f"--port {taken_port + 1}" in line


def test_a_port_in_use_that_the_environment_names_is_told_too(clone: Path, taken_port: int) -> None:
    assert f"Port {taken_port}" in refused(start(clone, "up", GATEHOUSE_PORT=str(taken_port)), clone)


@pytest.mark.parametrize("port", ["eighty", "-1", "65536"])
def test_what_is_not_a_port_is_told(clone: Path, port: str) -> None:
    assert "not a valid port" in refused(start(clone, "up", f"--port={port}"), clone)


def test_an_address_of_another_machine_is_told(clone: Path) -> None:
    assert "not an address of this machine" in refused(start(clone, "up", "--port", "0", "--host", "192.0.2.1"), clone)


def test_a_model_that_is_not_there_is_told(clone: Path) -> None:
    line = refused(start(clone, "up", "--port", "0", "--model", "nowhere/model"), clone)
    assert "nowhere/model" in line


def test_a_folder_that_is_not_a_model_is_told_with_what_it_lacks(clone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    line = refused(start(clone, "up", "--port", "0", "--model", str(folder)), clone)
    assert "tokenizer.json" in line
    assert "safetensors" in line
    assert "no config.json" not in line


def test_a_file_in_the_place_of_the_data_folder_is_told(clone: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "--data-dir" in refused(start(clone, "up", "--port", "0", "--data-dir", str(tmp_path / "file" / "data")), clone)


def test_a_database_of_an_unknown_kind_is_told_without_its_password(clone: Path) -> None:
    line = refused(start(clone, "up", "--port", "0", "--database", "mysql://root:hunter2@db/x"), clone)
    assert "postgresql://" in line
    assert "hunter2" not in line


def test_a_settings_file_that_is_not_toml_is_told(clone: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "gatehouse.toml").write_text("port: 8000")
    assert "gatehouse.toml" in refused(start(clone, "up", "--data-dir", str(data)), clone)


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="this machine has an NVIDIA GPU")
def test_asking_for_a_gpu_where_there_is_none_is_told(clone: Path) -> None:
    assert "requires an NVIDIA driver" in refused(start(clone, "up", "--port", "0", "--device", "cuda"), clone)


def test_an_environment_of_somebody_else_is_not_touched(clone: Path) -> None:
    (clone / ".venv").mkdir()
    (clone / ".venv" / "mine").write_text("precious")
    answer = start(clone, "up", "--port", "0")
    assert answer.returncode == 1
    assert "not created by this installer" in answer.stderr
    assert (clone / ".venv" / "mine").read_text() == "precious"


def test_doctor_says_what_to_do_when_nothing_is_installed(clone: Path) -> None:
    answer = start(clone, "doctor")
    assert answer.returncode == 1
    assert "python3 installer up" in answer.stdout


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="this machine has an NVIDIA GPU")
def test_a_machine_without_a_gpu_hears_no_word_of_cuda(clone: Path) -> None:
    answer = start(clone, "doctor")
    assert "cuda" not in (answer.stdout + answer.stderr).lower()
