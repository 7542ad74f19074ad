"""The whole suite in parts: no test file is left out, never too many run at once, what fails is told, nothing stays behind."""

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
BARE = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # begins sooner
DEADLINE_S = 300.0


@pytest.fixture
def suite(tmp_path: Path) -> list[Part]:
    """Three small parts: two pass, between them one fails."""
    texts = {"first": "def test_a(): pass\ndef test_b(): pass\n", "second": "def test_c(): assert 'this' == 'that'\n"}
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q\n")
    texts["third"] = "import pytest\ndef test_d(): pytest.skip('no such part here')\n"
    for name, text in texts.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    return [Part(name, (f"test_{name}.py",)) for name in texts]


def shell(tmp_path: Path, parallel_max: int, **environment: str) -> ParallelTests:
    """Runs a part's only file as a shell script."""
    return ParallelTests(["sh"], tmp_path, {**os.environ, **environment}, parallel_max)


def script(folder: Path, name: str, text: str) -> Part:
    (folder / name).write_text(text)
    return Part(name, (name,))


def test_every_test_file_belongs_to_exactly_one_part() -> None:
    given = Counter(file for part in suite_parts(REPO) for file in part.files)
    assert set(given.values()) == {1}
    assert {REPO / file for file in given} == set((REPO / "tests").rglob("test_*.py"))


def test_the_order_names_the_parts_that_there_are() -> None:
    assert sorted(part.name for part in suite_parts(REPO)) == sorted(LONGEST_FIRST)


@pytest.mark.parametrize(
    ("file", "part"),
    [("unit/test_engine_llm.py", "unit engine"), ("unit/test_house_files.py", "unit"), ("new/test_x.py", "new"),
     ("new/deep/test_x.py", "new"), ("test_x.py", "tests"), ("kernels/test_other_tritons.py", "other Tritons")],
)  # fmt: skip
def test_a_new_file_has_a_part_wherever_it_is_put(file: str, part: str) -> None:
    assert part_name(Path(file)) == part


def test_a_part_that_nobody_has_timed_begins_first(tmp_path: Path) -> None:
    for name in ("unit", "new"):
        (tmp_path / "tests" / name).mkdir(parents=True)
        (tmp_path / "tests" / name / "test_x.py").write_text("")
    assert [part.name for part in suite_parts(tmp_path)] == ["new", "unit"]


def test_a_failure_is_told_in_full_behind_everything_else_and_named_before(
    tmp_path: Path, suite: list[Part], capsys: pytest.CaptureFixture[str]
) -> None:
    with ParallelTests(PYTEST, tmp_path, BARE, 2) as running:
        outcomes = running.run(suite)
    assert "FAILED test_second.py::test_c" in capsys.readouterr().out
    told = summary(outcomes, 1.0, 2)
    table, _, rest = told.partition("##### ")
    assert re.search(r"^first +2 ", table, re.MULTILINE)
    assert re.search(r"^2 at a time +4 ", table, re.MULTILINE)
    assert rest.startswith("second: 1 failed")
    assert "assert 'this' == 'that'" in rest
    assert rest.endswith("1 failed, 2 passed, 1 skipped in 0:01; second failed")


def test_the_status_says_whether_something_failed(
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
    ("text", "told"),
    [("echo no words of pytest; exit 3", "no tests were run; status 3"), ("kill -9 $$", "ended by signal 9"),
     ("echo no tests ran in 0.01s; exit 5", "no tests were run; status 5")],
)  # fmt: skip
def test_a_part_that_ends_in_another_way_fails(tmp_path: Path, text: str, told: str) -> None:
    with shell(tmp_path, 1) as running:
        (outcome,) = running.run([script(tmp_path, "odd", text)])
    assert outcome.status != 0
    assert told in outcome.line()
    assert outcome.output in summary([outcome], 1.0, 1)


def test_words_behind_pytests_summary_hide_nothing(tmp_path: Path) -> None:
    with shell(tmp_path, 1) as running:
        text = "echo 2 failed, 3 passed, 1 error in 70.01s '(0:01:10)'; echo a library says good-bye; exit 1"
        (outcome,) = running.run([script(tmp_path, "wordy", text)])
    assert outcome.counts == {"failed": 2, "passed": 3, "error": 1}


def test_as_many_parts_run_at_once_as_were_asked_for(tmp_path: Path) -> None:
    # The first waits for a second; a third would find two at work.
    note = "echo begin >> notes; until [ $(grep -c begin notes) -ge 2 ]; do sleep 0.05; done; echo end >> notes"
    with shell(tmp_path, 2) as running:
        outcomes = running.run([script(tmp_path, f"part {number}", note) for number in range(5)])
    now = peak = 0
    for line in (tmp_path / "notes").read_text().split():
        now += 1 if line == "begin" else -1
        peak = max(peak, now)
    assert (peak, now) == (2, 0)
    assert [outcome.status for outcome in outcomes] == [0] * 5


def test_parts_share_what_they_have_compiled(tmp_path: Path) -> None:
    with shell(tmp_path, 1, PYTHONDONTWRITEBYTECODE="1") as running:
        (outcome,) = running.run([script(tmp_path, "part", 'echo "<$PYTHONDONTWRITEBYTECODE>"')])
    assert outcome.output == "<>\n"


@pytest.mark.parametrize(("parallel_max", "given", "threads"), [(2, {}, "1"), (1, {}, ""), (2, {"OMP_NUM_THREADS": "3"}, "3")])
def test_parts_beside_one_another_take_one_processor_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel_max: int, given: dict[str, str], threads: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with shell(tmp_path, parallel_max, **given) as running:
        (outcome,) = running.run([script(tmp_path, "part", 'echo "<$OMP_NUM_THREADS>"')])
    assert outcome.output == f"<{threads}>\n"


def test_processor_time_is_that_of_the_part_and_of_what_it_started(tmp_path: Path) -> None:
    burn = f"{sys.executable} -c 'import time\nwhile time.process_time() < 0.5: pass'"
    with shell(tmp_path, 2) as running:
        outcomes = running.run([script(tmp_path, "busy", burn), script(tmp_path, "idle", "sleep 0.5")])
    cpu_s = {outcome.part.name: outcome.cpu_s for outcome in outcomes}
    assert cpu_s["busy"] >= 0.5
    assert cpu_s["idle"] < 0.4


class Reader(io.StringIO):
    """Standard output that somebody reads: `told` is there as soon as `words` were written."""

    def __init__(self, words: str, told: Path) -> None:
        super().__init__()
        self._words, self._told = words, told

    def write(self, text: str) -> int:
        if self._words in text:
            self._told.touch()
        return super().write(text)


def test_how_far_the_parts_are_is_told_while_they_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_tests, "REPORT_EVERY_S", 0.0)
    monkeypatch.setattr(sys, "stdout", Reader("slow 40 %; 1 waiting\n", tmp_path / "told"))
    with shell(tmp_path, 1) as running:
        slow = "echo '.... [ 40%]'; until [ -e told ]; do sleep 0.05; done"
        running.run([script(tmp_path, "slow", slow), script(tmp_path, "next", "")])
    assert (tmp_path / "told").exists()


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN], ids=["in the foreground", "in the background"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing_running(tmp_path: Path, number: signal.Signals, before: signal.Handlers) -> None:
    (tmp_path / "test_long.py").write_text("""import os, pathlib, time
def test_long():
    try:
        pathlib.Path('pid').write_text(str(os.getpid()))
        time.sleep(600)
    finally:
        pathlib.Path('ended in order').touch()
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
    assert (tmp_path / "ended in order").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
