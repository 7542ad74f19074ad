"""Several pips at work in one environment: all of them end, whatever becomes of one. A script stands for pip."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from steps import pip
from steps.progress import Step

PIP = """#!/bin/sh
# pip, as far as the installer listens to it. The first word behind its options says what becomes of it.
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
    """An environment whose Python knows nothing but that pip."""
    program = tmp_path / ".venv" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(PIP, "utf-8")
    program.chmod(0o755)
    return tmp_path / ".venv"


def is_running(pid: int) -> bool:
    """Whether the process is there; one that nobody has asked for its end counts as there."""
    return Path(f"/proc/{pid}").exists()


def test_all_of_them_work_in_folders_of_their_own(venv: Path) -> None:
    pip.install(venv, [["works"], ["works"]], Step("Installing"), expected=2)
    assert sorted(path.relative_to(venv).as_posix() for path in venv.rglob("works")) == ["tmp/0/works", "tmp/1/works"]


def test_one_that_fails_says_why_and_ends_the_others(venv: Path) -> None:
    began_s = time.monotonic()
    with pytest.raises(pip.PipFailed) as failure:
        pip.install(venv, [["hangs"], ["fails"]], Step("Installing"), expected=2)
    assert failure.value.missing
    assert "two==2.0" in failure.value.text()
    assert time.monotonic() - began_s < 30
    for told in venv.glob("tmp/*/pid"):
        assert not is_running(int(told.read_text()))


def test_a_program_that_cannot_start_ends_those_that_could(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    environment = pip._environment

    def only_one(scratch: Path) -> dict[str, str]:
        if started:
            raise OSError(12, "Cannot allocate memory")
        started.append(scratch)
        return environment(scratch)

    monkeypatch.setattr(pip, "_environment", only_one)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        pip.install(venv, [["hangs"], ["hangs"]], Step("Installing"), expected=2)


def test_what_several_download_is_told_as_one(venv: Path) -> None:
    """The words on the terminal: sums over all pips, and the count of packages that are unpacked when all have come so far."""
    told: list[str] = []

    class Shown(Step):
        def detail(self, text: str) -> None:
            told.append(text)

    said = [pip._PipOutput(venv / str(number)) for number in range(2)]
    meter = pip._Meter(venv, said, Shown("Installing"), 5)
    for number, size in enumerate((3_000_000, 1_000_000)):
        folder = venv / str(number) / "pip-unpack-x"
        folder.mkdir(parents=True)
        (folder / "one.whl").write_bytes(bytes(size))
        said[number].line("Collecting one==1.0")
        said[number].line(f"  Downloading one.whl ({4 + number}.0 MB)")
    meter.show()
    said[0].line("Installing collected packages: one")
    meter.show()
    said[1].line("Installing collected packages: two")
    (venv / "lib/python3.11/site-packages/one-1.0.dist-info").mkdir(parents=True)
    meter.show()
    assert [re.sub(r" +", " ", line) for line in told] == [
        "downloading 4 of 9 MB, package 2 of 5",
        "downloading 1 of 5 MB, package 2 of 5",
        "unpacked 1 of 5",
    ]
