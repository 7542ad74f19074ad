"""The environment: complete or not there. pip and venv are replaced; the files, the states and their order are real."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from steps import environment, machine, pip, stamp
from steps.errors import InstallerError
from steps.locks import Lock, parse, read_lock, read_test_lock
from steps.progress import Step


class FakePip:
    """Stands for venv and pip: notes what is asked, installs nothing, fails when told to."""

    def __init__(self, venv: Path) -> None:
        self.venv = venv
        self.calls: list[list[str]] = []
        self.fail_at: int | None = None
        self.failure: BaseException = pip.PipFailed(["ERROR: ConnectTimeout"])

    def make_venv(self, venv: Path) -> None:
        (venv / "bin").mkdir()
        (venv / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
        (venv / "bin" / "python").symlink_to(sys.executable)

    def install(self, venv: Path, commands: Sequence[Sequence[str]], step: Step, *, expected: int) -> None:
        assert (venv / stamp.INCOMPLETE).exists(), "work goes on without the marker"
        (venv / "tmp").mkdir(exist_ok=True)
        for arguments in commands:
            self.calls.append(list(arguments))
            if self.fail_at == len(self.calls):
                raise self.failure


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    return tmp_path / ".venv"


@pytest.fixture
def fake(venv: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip(venv)
    monkeypatch.setattr(environment, "_make_venv", fake.make_venv)
    monkeypatch.setattr(pip, "install", fake.install)
    monkeypatch.setattr(pip, "num_parallel", lambda: 2)
    monkeypatch.setattr(environment, "REPO", venv.parent)
    monkeypatch.setattr(sys, "platform", "linux")
    return fake


def run_state(venv: Path, *, tests: bool = False) -> str:
    return stamp.state(venv, read_lock("cpu"), read_test_lock() if tests else None)


def test_a_first_run_installs_torch_first_and_everything_by_exact_version(venv: Path, fake: FakePip) -> None:
    environment.ensure("cpu", with_tests=False, venv=venv)
    assert [call[1] for call in fake.calls] == ["torch==2.13.0+cpu", "-r", "-r"]
    assert all(call[0] == "--no-deps" for call in fake.calls)
    assert not any("--no-compile" in call for call in fake.calls), "who serves may not be able to write here"
    assert run_state(venv) == "ready"


def test_a_second_run_asks_pip_for_nothing(venv: Path, fake: FakePip) -> None:
    environment.ensure("cpu", with_tests=False, venv=venv)
    environment.ensure("cpu", with_tests=False, venv=venv)
    assert len(fake.calls) == 3


def test_an_environment_of_another_python_is_used_and_told(
    venv: Path, fake: FakePip, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.ensure("cpu", with_tests=False, venv=venv)
    environment.ensure("cpu", with_tests=False, venv=venv)
    assert "remove it" not in capsys.readouterr().out
    monkeypatch.setattr("platform.python_version", lambda: "3.99.1")
    environment.ensure("cpu", with_tests=False, venv=venv)
    assert "remove it to use Python 3.99.1.\n" in capsys.readouterr().out
    assert run_state(venv) == "ready"


def test_the_tests_add_their_packages_to_what_is_there(venv: Path, fake: FakePip) -> None:
    environment.ensure("cpu", with_tests=False, venv=venv)
    environment.ensure("cpu", with_tests=True, venv=venv)
    assert [call[-1] for call in fake.calls[5:]] == ["triton==3.6.0", "triton==3.9.0"]
    assert run_state(venv, tests=True) == "ready"
    environment.ensure("cpu", with_tests=False, venv=venv)
    assert len(fake.calls) == 7, "an environment with the test packages serves as well"


def test_a_machine_with_a_gpu_gets_its_own_lock(venv: Path, fake: FakePip) -> None:
    environment.ensure("gpu", with_tests=False, venv=venv)
    assert fake.calls[0] == ["--no-deps", "torch==2.13.0"]
    assert stamp.state(venv, read_lock("gpu"), None) == "ready"
    assert stamp.state(venv, read_lock("cpu"), None) == "stale"


def tritons(fake: FakePip) -> dict[str, str]:
    """Version of Triton -> the folder it was put into, empty for the environment itself."""
    calls = [call for call in fake.calls if call[-1].startswith("triton==")]
    return {call[-1].removeprefix("triton=="): Path(call[2]).name if call[1] == "--target" else "" for call in calls}


def test_without_a_gpu_the_newest_triton_is_the_environments_and_the_oldest_lies_beside_it(venv: Path, fake: FakePip) -> None:
    environment.ensure("cpu", with_tests=True, venv=venv)
    assert tritons(fake) == {"3.6.0": "triton-3.6.0", "3.9.0": ""}
    assert all("--no-compile" in call for call in fake.calls), "tests import few of all files"


def test_the_triton_that_torch_is_tied_to_is_not_replaced_by_the_tests(venv: Path, fake: FakePip) -> None:
    environment.ensure("gpu", with_tests=True, venv=venv)
    assert tritons(fake) == {"3.6.0": "triton-3.6.0", "3.9.0": "triton-3.9.0"}


def test_a_triton_that_the_lock_no_longer_names_is_removed(venv: Path, fake: FakePip) -> None:
    environment.ensure("cpu", with_tests=False, venv=venv)
    (venv / "triton-3.5.0" / "triton").mkdir(parents=True)
    environment.ensure("cpu", with_tests=True, venv=venv)
    assert not (venv / "triton-3.5.0").exists()


def test_triton_is_not_asked_for_where_there_is_none(venv: Path, fake: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    environment.ensure("cpu", with_tests=True, venv=venv)
    assert tritons(fake) == {}


def test_a_changed_choice_of_tritons_makes_the_test_packages_old(venv: Path, fake: FakePip, tmp_path: Path) -> None:
    for profile in ("test", "triton"):
        (tmp_path / f"{profile}.txt").write_bytes(read_lock(profile).path.read_bytes())
    same = read_test_lock(tmp_path).digest
    assert same == read_test_lock().digest
    (tmp_path / "triton.txt").write_text("triton==3.6.0\ntriton==3.9.1\n")
    assert read_test_lock(tmp_path).digest != same


def test_a_failing_pip_leaves_nothing_behind(venv: Path, fake: FakePip) -> None:
    fake.fail_at = 2
    with pytest.raises(InstallerError, match="is unreachable"):
        environment.ensure("cpu", with_tests=False, venv=venv)
    assert not venv.exists()


def test_ctrl_c_leaves_nothing_behind(venv: Path, fake: FakePip) -> None:
    fake.fail_at, fake.failure = 1, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        environment.ensure("cpu", with_tests=False, venv=venv)
    assert not venv.exists()


def test_after_a_killed_run_the_environment_is_made_anew(venv: Path, fake: FakePip) -> None:
    stamp.mark_incomplete(venv)
    (venv / "lib").mkdir()
    (venv / "lib" / "half a package").write_text("")
    assert run_state(venv) == "broken"
    environment.ensure("cpu", with_tests=False, venv=venv)
    assert not (venv / "lib" / "half a package").exists()
    assert run_state(venv) == "ready"


def test_a_run_killed_while_adding_the_tests_is_seen(venv: Path, fake: FakePip) -> None:
    environment.ensure("cpu", with_tests=False, venv=venv)
    stamp.mark_incomplete(venv)
    assert run_state(venv) == "broken"


def test_an_environment_whose_interpreter_is_gone_is_made_anew(venv: Path, fake: FakePip) -> None:
    environment.ensure("cpu", with_tests=False, venv=venv)
    (venv / "bin" / "python").unlink()
    (venv / "bin" / "python").symlink_to("/nowhere/python3")
    assert run_state(venv) == "broken"
    environment.ensure("cpu", with_tests=False, venv=venv)
    assert run_state(venv) == "ready"


@pytest.mark.parametrize("field", ["place", "python", "run_digest", "profile"])
def test_an_environment_made_for_something_else_is_stale(venv: Path, fake: FakePip, field: str) -> None:
    environment.ensure("cpu", with_tests=False, venv=venv)
    content = json.loads((venv / stamp.STAMP).read_text())
    content[field] = "9.9.9" if field == "python" else "other"
    (venv / stamp.STAMP).write_text(json.dumps(content))
    assert run_state(venv) == "stale"


def test_a_changed_lock_is_seen(venv: Path, fake: FakePip, tmp_path: Path) -> None:
    environment.ensure("cpu", with_tests=False, venv=venv)
    (tmp_path / "cpu.txt").write_text(read_lock("cpu").path.read_text() + "one-more==1.0\n")
    assert stamp.state(venv, read_lock("cpu", tmp_path), None) == "stale"


def test_an_empty_folder_counts_as_no_environment(venv: Path) -> None:
    venv.mkdir()
    assert run_state(venv) == "absent"


def test_an_unreadable_stamp_is_not_taken_for_ours(venv: Path) -> None:
    venv.mkdir()
    (venv / stamp.STAMP).write_text("{}")
    assert run_state(venv) == "foreign"


def test_the_small_build_of_torch_is_looked_for_where_it_is_published(venv: Path, fake: FakePip) -> None:
    fake.fail_at = 1
    fake.failure = pip.PipFailed(["ERROR: No matching distribution found for torch==2.13.0+cpu"])
    environment.ensure("cpu", with_tests=False, venv=venv)
    assert fake.calls[1][-1] == "torch==2.13.0+cpu"
    assert "--index-url" in fake.calls[1]


def test_a_larger_build_of_torch_is_taken_where_there_is_no_small_one_and_told(
    venv: Path, fake: FakePip, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def install(venv: Path, commands: Sequence[Sequence[str]], step: Step, *, expected: int) -> None:
        fake.install(venv, commands, step, expected=expected)
        if commands[0][-1].endswith("+cpu"):
            raise pip.PipFailed([f"ERROR: No matching distribution found for {commands[0][-1]}"])

    monkeypatch.setattr(pip, "install", install)
    environment.ensure("cpu", with_tests=False, venv=venv)
    assert fake.calls[2] == ["torch==2.13.0"], "with what it needs, which the lock for the CPU does not hold"
    assert run_state(venv) == "ready"
    assert "done, with unused GPU libraries" in capsys.readouterr().out


def test_a_network_that_is_down_is_not_taken_for_a_missing_build(venv: Path, fake: FakePip) -> None:
    fake.fail_at = 1
    fake.failure = pip.PipFailed(["WARNING: NewConnectionError", "ERROR: No matching distribution found for torch==2.13.0+cpu"])
    with pytest.raises(InstallerError, match="is unreachable"):
        environment.ensure("cpu", with_tests=False, venv=venv)
    assert len(fake.calls) == 1


def test_too_little_disk_space_is_told_before_anything_is_made(
    venv: Path, fake: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "free_bytes", lambda path: 100 * machine.MIB)
    with pytest.raises(InstallerError, match="Not enough disk space"):
        environment.ensure("cpu", with_tests=False, venv=venv)
    assert not venv.exists()


def test_a_python_without_venv_is_told_what_to_install(venv: Path, fake: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InstallerError) as refusal:
        environment.ensure("cpu", with_tests=False, venv=venv)
    assert "apt-get install python3" in refusal.value.text()
    assert not venv.exists()


def test_the_command_is_written_and_the_clone_is_on_the_path(venv: Path, fake: FakePip) -> None:
    environment.ensure("cpu", with_tests=False, venv=venv)
    assert os.access(venv / "bin" / "gatehouse", os.X_OK)
    assert (venv / "lib/python3.11/site-packages/gatehouse.pth").read_text().strip() == str(venv.parent)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"], "disk became full"),
        (
            ["SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]"],
            "certificate of the package index was rejected",
        ),
        (["WARNING: Retrying after connection broken by 'NewConnectionError('"], "is unreachable"),
        (["ERROR: No matching distribution found for uvloop==0.23.0"], "no build of a locked package"),
        (["ERROR: something that nobody has seen before"], "Installing packages failed"),
    ],
)
def test_a_failure_of_pip_is_put_in_words(lines: list[str], problem: str) -> None:
    assert problem in pip.PipFailed(lines).text()


def test_of_pips_output_the_errors_are_shown_and_the_noise_is_not() -> None:
    lines = ["Looking in links: x", "WARNING: Location 'y' is ignored", "ERROR: the reason"]
    assert pip.relevant(lines) == ("ERROR: the reason",)
    assert pip.relevant(lines[:2]) == ("Looking in links: x",)


@pytest.mark.parametrize("line", ["torch>=2", "torch", "-r other.txt", "torch==2.*x y"])
def test_a_lock_holds_exact_pins_only(line: str) -> None:
    with pytest.raises(ValueError, match="not an exact pin"):
        parse(line)


def test_a_pin_is_read_with_its_marker() -> None:
    (pin,) = parse("Some_Thing==1.0+cpu ; sys_platform == 'linux'  # for torch\n# a comment\n")
    assert (pin.name, pin.version, pin.marker) == ("some-thing", "1.0+cpu", "sys_platform == 'linux'")
    assert Lock("cpu", Path("x"), (pin,), "").version("some-thing") == "1.0"
