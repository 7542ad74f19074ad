"""Parallel pip processes in one environment, played by a script: separate folders, failures, and progress."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from steps import pip
from steps.progress import Step

PIP = """#!/bin/sh
# Prints what the installer parses of pip's output. The first argument after the options selects the outcome.
for word in "$@"; do
    case "$word" in
        --) ;;
        works) echo "Collecting one==1.0"; echo "Installing collected packages: one"; echo done > "$TMPDIR/works"; exit 0 ;;
        fails) echo "ERROR: No matching distribution found for two==2.0"; exit 1 ;;
        hangs) echo $$ > "$TMPDIR/pid"; exec sleep 60 ;;
    esac
done
"""


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment whose Python is the script PIP."""
    program = tmp_path / ".venv" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(PIP, "utf-8")
    program.chmod(0o755)
    return tmp_path / ".venv"


def is_running(pid: int) -> bool:
    """Return whether the process exists; a zombie exists."""
    return Path(f"/proc/{pid}").exists()


def test_parallel_processes_have_separate_temporary_folders(venv: Path) -> None:
    pip.install(venv, [["works"], ["works"]], Step("Installing"), expected=2)
    assert sorted(path.relative_to(venv).as_posix() for path in venv.rglob("works")) == ["tmp/0/works", "tmp/1/works"]


def test_a_failure_is_explained_and_ends_the_other_processes(venv: Path) -> None:
    began_s = time.monotonic()
    with pytest.raises(pip.PipFailed) as failure:
        pip.install(venv, [["hangs"], ["fails"]], Step("Installing"), expected=2)
    assert failure.value.missing
    assert "two==2.0" in failure.value.text()
    assert time.monotonic() - began_s < 30
    for pid_file in venv.glob("tmp/*/pid"):
        assert not is_running(int(pid_file.read_text()))


def test_a_process_that_cannot_start_ends_the_others(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    environment = pip._environment

    def environment_once(scratch: Path) -> dict[str, str]:
        if started:
            raise OSError(12, "Cannot allocate memory")
        started.append(scratch)
        return environment(scratch)

    monkeypatch.setattr(pip, "_environment", environment_once)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        pip.install(venv, [["hangs"], ["hangs"]], Step("Installing"), expected=2)


def test_the_progress_of_parallel_downloads_is_shown_as_one_line(venv: Path) -> None:
    """Sums over all processes while any of them downloads, then the number of unpacked packages."""
    shown: list[str] = []

    class RecordingStep(Step):
        def detail(self, text: str) -> None:
            shown.append(text)

    outputs = [pip._PipOutput(venv / str(number)) for number in range(2)]
    meter = pip._Meter(venv, outputs, RecordingStep("Installing"), 5)
    for number, size in enumerate((3_000_000, 1_000_000)):
        folder = venv / str(number) / "pip-unpack-x"
        folder.mkdir(parents=True)
        (folder / "one.whl").write_bytes(bytes(size))
        outputs[number].line("Collecting one==1.0")
        outputs[number].line(f"  Downloading one.whl ({4 + number}.0 MB)")
    meter.show()
    outputs[0].line("Installing collected packages: one")
    meter.show()
    outputs[1].line("Installing collected packages: two")
    (venv / "lib/python3.11/site-packages/one-1.0.dist-info").mkdir(parents=True)
    meter.show()
    assert [re.sub(r" +", " ", line) for line in shown] == [
        "downloading 4 of 9 MB, package 2 of 5",
        "downloading 1 of 5 MB, package 2 of 5",
        "unpacked 1 of 5",
    ]
