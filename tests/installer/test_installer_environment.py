"""The virtual environment: complete or absent. pip and venv are fakes; files, states and order of steps are real."""

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
from steps.paths import REQUIREMENTS
from steps.progress import Step


class FakePip:
    """Replaces venv and pip: records calls, installs nothing, and raises `failure` at call number `fail_at`."""

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
        assert (venv / stamp.INCOMPLETE).exists(), "pip runs without the marker of an incomplete environment"
        (venv / "tmp").mkdir(exist_ok=True)
        for arguments in commands:
            self.calls.append(list(arguments))
            if self.fail_at == len(self.calls):
                raise self.failure


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    return tmp_path / ".venv"


@pytest.fixture
def fake_pip(venv: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake_pip = FakePip(venv)
    monkeypatch.setattr(environment, "_make_venv", fake_pip.make_venv)
    monkeypatch.setattr(pip, "install", fake_pip.install)
    monkeypatch.setattr(pip, "num_parallel", lambda: 2)
    monkeypatch.setattr(environment, "REPO", venv.parent)
    monkeypatch.setattr(sys, "platform", "linux")
    return fake_pip


def run_state(venv: Path, *, tests: bool = False) -> str:
    return stamp.state(venv, read_lock("cpu"), read_test_lock() if tests else None)


def test_a_first_run_installs_torch_first_and_exact_versions(venv: Path, fake_pip: FakePip) -> None:
    environment.ensure("cpu", with_tests=False, venv=venv)
    assert [call[1] for call in fake_pip.calls] == ["torch==2.13.0+cpu", "-r", "-r"]
    assert all(call[0] == "--no-deps" for call in fake_pip.calls)
    assert not any("--no-compile" in call for call in fake_pip.calls), (
        "byte code is compiled: the serving user may not be able to write here"
    )
    assert run_state(venv) == "ready"


def test_a_second_run_installs_nothing(venv: Path, fake_pip: FakePip) -> None:
    environment.ensure("cpu", with_tests=False, venv=venv)
    environment.ensure("cpu", with_tests=False, venv=venv)
    assert len(fake_pip.calls) == 3


def test_an_environment_of_another_python_is_used_with_a_notice(
    venv: Path, fake_pip: FakePip, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.ensure("cpu", with_tests=False, venv=venv)
    environment.ensure("cpu", with_tests=False, venv=venv)
    assert "remove it" not in capsys.readouterr().out
    monkeypatch.setattr("platform.python_version", lambda: "3.99.1")
    environment.ensure("cpu", with_tests=False, venv=venv)
    assert "remove it to use Python 3.99.1.\n" in capsys.readouterr().out
    assert run_state(venv) == "ready"


def test_test_packages_are_added_to_an_existing_environment(venv: Path, fake_pip: FakePip) -> None:
    environment.ensure("cpu", with_tests=False, venv=venv)
    environment.ensure("cpu", with_tests=True, venv=venv)
    assert [call[-1] for call in fake_pip.calls[5:]] == ["triton==3.6.0", "triton==3.9.0"]
    assert run_state(venv, tests=True) == "ready"
    environment.ensure("cpu", with_tests=False, venv=venv)
    assert len(fake_pip.calls) == 7, "an environment with the test packages is complete for serving too"


def test_the_gpu_profile_has_its_own_lock(venv: Path, fake_pip: FakePip) -> None:
    environment.ensure("gpu", with_tests=False, venv=venv)
    assert fake_pip.calls[0] == ["--no-deps", "torch==2.13.0"]
    assert stamp.state(venv, read_lock("gpu"), None) == "ready"
    assert stamp.state(venv, read_lock("cpu"), None) == "stale"


def tritons(fake_pip: FakePip) -> dict[str, str]:
    """Return the target folder by version of Triton; empty for the environment itself."""
    calls = [call for call in fake_pip.calls if call[-1].startswith("triton==")]
    return {call[-1].removeprefix("triton=="): Path(call[2]).name if call[1] == "--target" else "" for call in calls}


def test_without_a_gpu_the_newest_triton_is_installed_and_the_oldest_beside_it(venv: Path, fake_pip: FakePip) -> None:
    environment.ensure("cpu", with_tests=True, venv=venv)
    assert tritons(fake_pip) == {"3.6.0": "triton-3.6.0", "3.9.0": ""}
    assert all("--no-compile" in call for call in fake_pip.calls), "tests import only few of the files"


def test_the_tests_do_not_replace_the_triton_that_torch_requires(venv: Path, fake_pip: FakePip) -> None:
    environment.ensure("gpu", with_tests=True, venv=venv)
    assert tritons(fake_pip) == {"3.6.0": "triton-3.6.0", "3.9.0": "triton-3.9.0"}


def test_a_triton_that_is_no_longer_locked_is_removed(venv: Path, fake_pip: FakePip) -> None:
    environment.ensure("cpu", with_tests=False, venv=venv)
    (venv / "triton-3.5.0" / "triton").mkdir(parents=True)
    environment.ensure("cpu", with_tests=True, venv=venv)
    assert not (venv / "triton-3.5.0").exists()


def test_triton_is_not_installed_on_platforms_without_it(
    venv: Path, fake_pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    environment.ensure("cpu", with_tests=True, venv=venv)
    assert tritons(fake_pip) == {}


def test_another_choice_of_tritons_makes_the_test_packages_stale(venv: Path, fake_pip: FakePip, tmp_path: Path) -> None:
    for profile in ("test", "triton"):
        (tmp_path / f"{profile}.txt").write_bytes((REQUIREMENTS / f"{profile}.txt").read_bytes())
    same = read_test_lock(tmp_path).digest
    assert same == read_test_lock().digest
    (tmp_path / "triton.txt").write_text("triton==3.6.0\ntriton==3.9.1\n")
    assert read_test_lock(tmp_path).digest != same


def test_a_failing_pip_leaves_no_environment(venv: Path, fake_pip: FakePip) -> None:
    fake_pip.fail_at = 2
    with pytest.raises(InstallerError, match="is unreachable"):
        environment.ensure("cpu", with_tests=False, venv=venv)
    assert not venv.exists()


def test_an_interrupt_leaves_no_environment(venv: Path, fake_pip: FakePip) -> None:
    fake_pip.fail_at, fake_pip.failure = 1, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        environment.ensure("cpu", with_tests=False, venv=venv)
    assert not venv.exists()


def test_after_a_killed_run_the_environment_is_recreated(venv: Path, fake_pip: FakePip) -> None:
    stamp.mark_incomplete(venv)
    (venv / "lib").mkdir()
    (venv / "lib" / "half a package").write_text("")
    assert run_state(venv) == "broken"
    environment.ensure("cpu", with_tests=False, venv=venv)
    assert not (venv / "lib" / "half a package").exists()
    assert run_state(venv) == "ready"


def test_a_run_killed_while_adding_test_packages_is_detected(venv: Path, fake_pip: FakePip) -> None:
    environment.ensure("cpu", with_tests=False, venv=venv)
    stamp.mark_incomplete(venv)
    assert run_state(venv) == "broken"


def test_an_environment_without_its_interpreter_is_recreated(venv: Path, fake_pip: FakePip) -> None:
    environment.ensure("cpu", with_tests=False, venv=venv)
    (venv / "bin" / "python").unlink()
    (venv / "bin" / "python").symlink_to("/nowhere/python3")
    assert run_state(venv) == "broken"
    environment.ensure("cpu", with_tests=False, venv=venv)
    assert run_state(venv) == "ready"


@pytest.mark.parametrize("field", ["place", "python", "run_digest", "profile"])
def test_an_environment_of_another_profile_or_lock_is_stale(venv: Path, fake_pip: FakePip, field: str) -> None:
    environment.ensure("cpu", with_tests=False, venv=venv)
    content = json.loads((venv / stamp.STAMP).read_text())
    content[field] = "9.9.9" if field == "python" else "other"
    (venv / stamp.STAMP).write_text(json.dumps(content))
    assert run_state(venv) == "stale"


def test_a_changed_lock_is_detected(venv: Path, fake_pip: FakePip, tmp_path: Path) -> None:
    environment.ensure("cpu", with_tests=False, venv=venv)
    (tmp_path / "cpu.txt").write_text((REQUIREMENTS / "cpu.txt").read_text() + "one-more==1.0\n")
    assert stamp.state(venv, read_lock("cpu", tmp_path), None) == "stale"


def test_an_empty_folder_is_an_absent_environment(venv: Path) -> None:
    venv.mkdir()
    assert run_state(venv) == "absent"


def test_an_unreadable_stamp_is_not_accepted(venv: Path) -> None:
    venv.mkdir()
    (venv / stamp.STAMP).write_text("{}")
    assert run_state(venv) == "foreign"


def test_the_cpu_build_of_torch_is_searched_at_its_own_index(venv: Path, fake_pip: FakePip) -> None:
    fake_pip.fail_at = 1
    fake_pip.failure = pip.PipFailed(["ERROR: No matching distribution found for torch==2.13.0+cpu"])
    environment.ensure("cpu", with_tests=False, venv=venv)
    assert fake_pip.calls[1][-1] == "torch==2.13.0+cpu"
    assert "--index-url" in fake_pip.calls[1]


def test_without_a_cpu_build_the_larger_build_of_torch_is_installed_with_a_notice(
    venv: Path, fake_pip: FakePip, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def install(venv: Path, commands: Sequence[Sequence[str]], step: Step, *, expected: int) -> None:
        fake_pip.install(venv, commands, step, expected=expected)
        if commands[0][-1].endswith("+cpu"):
            raise pip.PipFailed([f"ERROR: No matching distribution found for {commands[0][-1]}"])

    monkeypatch.setattr(pip, "install", install)
    environment.ensure("cpu", with_tests=False, venv=venv)
    assert fake_pip.calls[2] == ["torch==2.13.0"], "with what it needs, which the lock for the CPU does not hold"
    assert run_state(venv) == "ready"
    assert "done, with unused GPU libraries" in capsys.readouterr().out


def test_a_network_error_is_not_treated_as_a_missing_build(venv: Path, fake_pip: FakePip) -> None:
    fake_pip.fail_at = 1
    fake_pip.failure = pip.PipFailed(
        ["WARNING: NewConnectionError", "ERROR: No matching distribution found for torch==2.13.0+cpu"]
    )
    with pytest.raises(InstallerError, match="is unreachable"):
        environment.ensure("cpu", with_tests=False, venv=venv)
    assert len(fake_pip.calls) == 1


def test_too_little_disk_space_is_refused_before_creating_files(
    venv: Path, fake_pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "free_bytes", lambda path: 100 * machine.MIB)
    with pytest.raises(InstallerError, match="Not enough disk space"):
        environment.ensure("cpu", with_tests=False, venv=venv)
    assert not venv.exists()


def test_a_python_without_venv_is_refused_with_the_package_to_install(
    venv: Path, fake_pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InstallerError) as refusal:
        environment.ensure("cpu", with_tests=False, venv=venv)
    assert "apt-get install python3" in refusal.value.text()
    assert not venv.exists()


def test_the_command_is_written_and_the_clone_is_importable(venv: Path, fake_pip: FakePip) -> None:
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
def test_a_failure_of_pip_is_explained(lines: list[str], problem: str) -> None:
    assert problem in pip.PipFailed(lines).text()


def test_only_errors_of_pip_s_output_are_shown() -> None:
    lines = ["Looking in links: x", "WARNING: Location 'y' is ignored", "ERROR: the reason"]
    assert pip.relevant(lines) == ("ERROR: the reason",)
    assert pip.relevant(lines[:2]) == ("Looking in links: x",)


@pytest.mark.parametrize("line", ["torch>=2", "torch", "-r other.txt", "torch==2.*x y"])
def test_a_lock_accepts_only_exact_pins(line: str) -> None:
    with pytest.raises(ValueError, match="not an exact pin"):
        parse(line)


def test_a_pin_is_parsed_with_its_marker() -> None:
    (pin,) = parse("Some_Thing==1.0+cpu ; sys_platform == 'linux'  # for torch\n# a comment\n")
    assert (pin.name, pin.version, pin.marker) == ("some-thing", "1.0+cpu", "sys_platform == 'linux'")
    assert Lock("cpu", (pin,), "").version("some-thing") == "1.0"
