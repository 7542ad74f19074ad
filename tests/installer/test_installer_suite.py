"""The test suite in parallel parts: membership, order, parallelism, reports, exit status and interruption."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest
from steps import parallel_tests, suite_command
from steps.parallel_tests import ParallelTests, summary
from steps.suite_parts import LONGEST_FIRST, Part, part_name, suite_parts

REPO = Path(__file__).resolve().parents[2]
PYTEST = [sys.executable, *suite_command._WHOLE_SUITE]
BARE = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # starts faster
DEADLINE_S = 300.0


@pytest.fixture
def suite(tmp_path: Path) -> list[Part]:
    """Three small parts: the first passes, the second fails, the third is skipped."""
    texts = {"first": "def test_a(): pass\ndef test_b(): pass\n", "second": "def test_c(): assert 'this' == 'that'\n"}
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q\n")
    texts["third"] = "import pytest\ndef test_d(): pytest.skip('no such part here')\n"
    for name, text in texts.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    return [Part(name, (f"test_{name}.py",)) for name in texts]


def shell_parts(tmp_path: Path, parallel_max: int, **environment: str) -> ParallelTests:
    """Return a runner that runs the only file of each part as a shell script."""
    return ParallelTests(["sh"], tmp_path, {**os.environ, **environment}, parallel_max)


def script(folder: Path, name: str, text: str) -> Part:
    (folder / name).write_text(text)
    return Part(name, (name,))


def test_every_test_file_belongs_to_exactly_one_part() -> None:
    given = Counter(file for part in suite_parts(REPO) for file in part.files)
    assert set(given.values()) == {1}
    assert {REPO / file for file in given} == set((REPO / "tests").rglob("test_*.py"))


def test_the_order_lists_exactly_the_existing_parts() -> None:
    assert sorted(part.name for part in suite_parts(REPO)) == sorted(LONGEST_FIRST)


@pytest.mark.parametrize(
    ("file", "part"),
    [("unit/test_engine_llm.py", "unit engine"), ("unit/test_house_files.py", "unit"), ("new/test_x.py", "new"),
     ("new/deep/test_x.py", "new"), ("test_x.py", "tests"), ("kernels/test_other_tritons.py", "other Tritons")],
)  # fmt: skip
def test_every_path_of_a_test_file_has_a_part(file: str, part: str) -> None:
    assert part_name(Path(file)) == part


def test_a_part_that_is_not_in_the_order_starts_first(tmp_path: Path) -> None:
    for name in ("unit", "new"):
        (tmp_path / "tests" / name).mkdir(parents=True)
        (tmp_path / "tests" / name / "test_x.py").write_text("")
    assert [part.name for part in suite_parts(tmp_path)] == ["new", "unit"]


def test_a_failure_is_printed_in_full_at_the_end_and_listed_in_the_summary(
    tmp_path: Path, suite: list[Part], capsys: pytest.CaptureFixture[str]
) -> None:
    with ParallelTests(PYTEST, tmp_path, BARE, 2) as running:
        outcomes = running.run(suite)
    assert "FAILED test_second.py::test_c" in capsys.readouterr().out
    report = summary(outcomes, 1.0, 2)
    table, _, rest = report.partition("##### ")
    assert re.search(r"^first +2 ", table, re.MULTILINE)
    assert re.search(r"^2 at a time +4 ", table, re.MULTILINE)
    assert rest.startswith("second: 1 failed")
    assert "assert 'this' == 'that'" in rest
    assert rest.endswith("1 failed, 2 passed, 1 skipped in 0:01; second failed")


def test_the_exit_status_is_1_if_a_part_failed(
    tmp_path: Path, suite: list[Part], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", BARE)
    monkeypatch.setattr(suite_command, "REPO", tmp_path)
    monkeypatch.setattr(suite_command, "suite_parts", lambda clone: suite)
    assert suite_command.run_suite(PYTEST) == 1
    monkeypatch.setattr(suite_command, "suite_parts", lambda clone: [suite[0], suite[2]])
    assert suite_command.run_suite(PYTEST) == 0
    assert "2 passed, 1 skipped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "expected"),
    [("echo no words of pytest; exit 3", "no tests were run; status 3"), ("kill -9 $$", "ended by signal 9"),
     ("echo no tests ran in 0.01s; exit 5", "no tests were run; status 5")],
)  # fmt: skip
def test_a_part_that_runs_no_tests_or_is_killed_fails(tmp_path: Path, text: str, expected: str) -> None:
    with shell_parts(tmp_path, 1) as running:
        (outcome,) = running.run([script(tmp_path, "odd", text)])
    assert outcome.status != 0
    assert expected in outcome.line()
    assert outcome.output in summary([outcome], 1.0, 1)


def test_output_after_the_summary_of_pytest_does_not_hide_failures(tmp_path: Path) -> None:
    with shell_parts(tmp_path, 1) as running:
        text = "echo 2 failed, 3 passed, 1 error in 70.01s '(0:01:10)'; echo a library says good-bye; exit 1"
        (outcome,) = running.run([script(tmp_path, "wordy", text)])
    assert outcome.counts == {"failed": 2, "passed": 3, "error": 1}


def test_exactly_the_requested_number_of_parts_runs_in_parallel(tmp_path: Path) -> None:
    # Each part waits until a second one has begun; a third in parallel would raise the peak.
    note = "echo begin >> notes; until [ $(grep -c begin notes) -ge 2 ]; do sleep 0.05; done; echo end >> notes"
    with shell_parts(tmp_path, 2) as running:
        outcomes = running.run([script(tmp_path, f"part {number}", note) for number in range(5)])
    now = peak = 0
    for line in (tmp_path / "notes").read_text().split():
        now += 1 if line == "begin" else -1
        peak = max(peak, now)
    assert (peak, now) == (2, 0)
    assert [outcome.status for outcome in outcomes] == [0] * 5


def test_parts_share_compiled_bytecode(tmp_path: Path) -> None:
    with shell_parts(tmp_path, 1, PYTHONDONTWRITEBYTECODE="1") as running:
        (outcome,) = running.run([script(tmp_path, "part", 'echo "<$PYTHONDONTWRITEBYTECODE>"')])
    assert outcome.output == "<>\n"


@pytest.mark.parametrize(("parallel_max", "given", "threads"), [(2, {}, "1"), (1, {}, ""), (2, {"OMP_NUM_THREADS": "3"}, "3")])
def test_parallel_parts_use_one_thread_each_unless_set_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel_max: int, given: dict[str, str], threads: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with shell_parts(tmp_path, parallel_max, **given) as running:
        (outcome,) = running.run([script(tmp_path, "part", 'echo "<$OMP_NUM_THREADS>"')])
    assert outcome.output == f"<{threads}>\n"


def test_cpu_time_covers_a_part_and_its_children(tmp_path: Path) -> None:
    burn = f"{sys.executable} -c 'import time\nwhile time.process_time() < 0.5: pass'"
    with shell_parts(tmp_path, 2) as running:
        outcomes = running.run([script(tmp_path, "busy", burn), script(tmp_path, "idle", "sleep 0.5")])
    cpu_s = {outcome.part.name: outcome.cpu_s for outcome in outcomes}
    assert cpu_s["busy"] >= 0.5
    assert cpu_s["idle"] < 0.4


class NotifyingOutput(io.StringIO):
    """Standard output that creates the file `marker` when `words` are written."""

    def __init__(self, words: str, marker: Path) -> None:
        super().__init__()
        self._words, self._marker = words, marker

    def write(self, text: str) -> int:
        if self._words in text:
            self._marker.touch()
        return super().write(text)


def test_progress_is_printed_while_parts_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_tests, "REPORT_EVERY_S", 0.0)
    monkeypatch.setattr(sys, "stdout", NotifyingOutput("slow 40 %; 1 waiting\n", tmp_path / "reported"))
    with shell_parts(tmp_path, 1) as running:
        slow = "echo '.... [ 40%]'; until [ -e reported ]; do sleep 0.05; done"
        running.run([script(tmp_path, "slow", slow), script(tmp_path, "next", "")])
    assert (tmp_path / "reported").exists()


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN], ids=["in_the_foreground", "in_the_background"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_processes(tmp_path: Path, number: signal.Signals, before: signal.Handlers) -> None:
    (tmp_path / "test_long.py").write_text("""import os, pathlib, time
def test_long():
    try:
        pathlib.Path('pid').write_text(str(os.getpid()))
        time.sleep(600)
    finally:
        pathlib.Path('cleaned up').touch()
""")
    program = f"""
        import signal, sys
        from steps.command_line import _as_interrupt
        from steps.suite_parts import Part
        from steps.parallel_tests import ParallelTests
        signal.signal(signal.SIGTERM, _as_interrupt)
        with ParallelTests({PYTEST!r}, {str(tmp_path)!r}, {BARE!r}, 1) as running:
            running.run([Part("long", ("test_long.py",))])
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": str(REPO / "installer")},
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, before),  # noqa: PLW1509 - nothing else runs in this process
    )
    end_s = time.monotonic() + DEADLINE_S
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < end_s
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(DEADLINE_S) != 0
    assert (tmp_path / "cleaned up").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
