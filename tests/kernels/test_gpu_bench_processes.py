"""Processes of the GPU benchmark: when they import, when they are ended, and what is kept of those that hang."""

from __future__ import annotations

import io
import json
import os
import queue
import select
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from bench.gpu import device_lost, part, processes
from bench.gpu.plan import BY_NAME, Job
from bench.gpu.processes import Outcome, Recorder
from bench.gpu.report import complete_rows, document, table
from bench.gpu.rows import Row, invalid_reason
from tests.support.triton_versions import REPO


@dataclass(eq=False)
class Stuck:
    """A process that is late, and whose output somebody holds open when it was killed."""

    job: Job
    allowed_s: float = 1.0
    limit_s: float = 1.0
    left_s: float = -1.0
    elapsed_s: float = 2.0
    timed_out: bool = False
    abandon_reason: str = ""
    ends: int = 0

    def begin(self, facts: dict[str, Any], limit_s: float, done: Sequence[str] = ()) -> None: ...

    def time_out(self) -> None:
        self.timed_out, self.ends = True, self.ends + 1

    def close(self) -> tuple[int | None, str]:
        self.abandon_reason = "it does not end"
        return None, "its log"


def test_a_process_that_cannot_be_killed_is_recorded_and_the_run_continues() -> None:
    stuck, outcome, shown = Stuck(Job((BY_NAME["latency"],))), Outcome(), list[str]()
    lines: Any = queue.Queue()
    processes._run([stuck], lines, 1.0, Recorder(outcome, shown.append))  # type: ignore[list-item]
    assert stuck.ends == 1
    assert outcome.parts[0]["error"] == "ended after its limit of 1 s; it does not end"
    assert outcome.parts[0]["log"] == "its log"
    assert shown


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (1, "exit status 1: its log"),
        (-11, "ended by SIGSEGV: its log"),
        (-9, "ended by SIGKILL, as by the system when main memory is used up: its log"),
    ],
)
def test_the_error_of_a_part_names_the_signal_that_ended_it(
    status: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = Outcome()
    monkeypatch.setattr(Stuck, "close", lambda _: (status, "its log"))
    Recorder(outcome, lambda _: None).add_end(Stuck(Job((BY_NAME["latency"],))))  # type: ignore[arg-type]
    assert outcome.parts[0]["error"] == expected


CRASH = """an earlier line
Fatal Python error: Segmentation fault

Thread 0x00007f01 (most recent call first):
  File "threading.py", line 1 in wait

Current thread 0x00007f02 (most recent call first):
  File "compiler.py", line 2 in make_cubin
  File "part.py", line 3 in main

Extension modules: numpy._core, torch._C (total: 2)
"""


@pytest.mark.parametrize(
    ("log", "line"),
    [(CRASH, 'File "compiler.py", line 2 in make_cubin'), ("first\nlast\n\n", "last"), ("", "no output")],
)
def test_the_error_of_a_crash_says_where_it_happened(log: str, line: str) -> None:
    assert processes._last_line(log) == line


class Script(list[Any]):
    """Stands for the queue of lines: gives what is next, or raises it."""

    def get(self, timeout: float) -> Any:
        entry = self.pop(0)
        if isinstance(entry, BaseException):
            raise entry
        return entry


def test_output_of_an_abandoned_process_is_ignored() -> None:
    stuck, other = Stuck(Job((BY_NAME["latency"],))), Stuck(Job((BY_NAME["formats"],)), left_s=5.0)
    row = json.dumps({"row": Row(name="late").as_dict()}) + "\n"
    lines: Any = Script([queue.Empty(), queue.Empty(), (stuck, row), (stuck, None), (other, None)])
    outcome = Outcome()
    processes._run([stuck, other], lines, 1.0, Recorder(outcome, lambda _: None))  # type: ignore[list-item]
    assert [entry["part"] for entry in outcome.parts] == ["latency", "formats"]
    assert not outcome.rows


def test_a_part_over_its_limit_is_killed_and_its_rows_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[subprocess.Popen[str]] = []
    wait = subprocess.Popen.wait

    def hangs(process: subprocess.Popen[str], timeout: float | None = None) -> int:
        assert timeout is not None
        held.append(process)
        raise subprocess.TimeoutExpired("part", timeout)

    late = Job((replace(BY_NAME["check rows"], limit_s=0.00125),))
    kept: list[int] = []
    outcome = Outcome()
    recorder = Recorder(outcome, lambda _: None, keep=lambda found: kept.append(len(found.parts)))
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "wait", hangs)
        processes.run_stages([[late]], rehearse=True, total_s=60, recorder=recorder)
    for process in held:
        wait(process)
    assert "ended after its limit of 0.01 s; its process does not end" in outcome.parts[0]["error"]
    assert "begins part=check rows" in outcome.parts[0]["log"], "what it imports is not of its time"
    assert kept == [1], "after each part"
    rows = {row.name: row for row in complete_rows(outcome, {"checks"})}
    assert "check rows: ended after its limit" in rows["numbers: rms norm"].error
    assert "check rows: ended after its limit" in table(document(list(rows.values()), outcome, rehearsal=False, taken_s=1.0))
    assert not invalid_reason(rows["numbers: rms norm"])


def test_processes_hanging_in_the_driver_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, killed = [0.0], list[int]()

    class Hanging:
        pid = 1

        def __init__(self, *_: object, **__: object) -> None:
            self.stdin, self.stdout = io.StringIO(), io.StringIO()

        def poll(self) -> None: ...

        def wait(self, timeout: float) -> int:
            now_s[0] += timeout
            raise subprocess.TimeoutExpired("part", timeout)

    class Silence:
        def get(self, timeout: float) -> Any:
            now_s[0] += timeout
            raise queue.Empty

    monkeypatch.setattr(processes, "time", Mock(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(os, "killpg", lambda pid, _: killed.append(pid))
    lines: Any = Silence()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", Hanging)
        hanging = [processes.Process(Job((part,)), rehearse=False, environment={}) for part in BY_NAME.values()]
    outcome = Outcome()
    processes._run(hanging, lines, 20.0, Recorder(outcome, lambda _: None))
    assert now_s[0] < 20.0 + processes.KILL_WAIT_S + 1.0
    assert len(killed) == len(hanging)
    assert all("does not end" in entry["error"] for entry in outcome.parts)
    assert len(outcome.parts) == len(hanging)


def test_waiting_for_the_first_imports_is_limited_and_consumes_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: Any = queue.Queue()
    one, other = (Stuck(Job((BY_NAME["calibrate"],))) for _ in range(2))
    lines_out = [(one, '{"ready": []}\n'), (other, None)]
    for line in lines_out:
        lines.put(line)
    processes._wait_for_imports([one, other], lines)  # type: ignore[list-item]
    assert [lines.get_nowait() for _ in lines_out] == lines_out, "what was said is still there for whoever reads it"
    monkeypatch.setattr(processes, "IMPORT_S", 0.01)
    processes._wait_for_imports([one], lines)  # type: ignore[list-item]


def test_an_interrupted_run_keeps_the_rows_and_the_log_of_its_current_stage() -> None:
    notes: list[str] = []

    @dataclass(eq=False)
    class Measuring(Stuck):
        left_s: float = 5.0

        def kill(self) -> None:
            notes.append("killed")

    process = Measuring(Job((BY_NAME["latency"],)))
    row = json.dumps({"row": Row(name="decode 1 × 32k", value=1.0).as_dict()}) + "\n"
    lines: Any = Script([(process, row), SystemExit(143)])
    outcome = Outcome()
    recorder = Recorder(outcome, lambda _: None, keep=lambda kept: notes.append(f"kept {len(kept.rows)}, {len(kept.parts)}"))
    with pytest.raises(SystemExit):
        processes._run([process], lines, 1.0, recorder)  # type: ignore[list-item]
    assert notes == ["kept 1, 0", "killed", "kept 1, 1"]
    [part_record] = outcome.parts
    assert (part_record["error"], part_record["log"]) == ("the run was interrupted 2 s after it began", "its log")
    rows = {row.name: row.error for row in complete_rows(outcome, {"latency", "formats"})}
    assert rows["32k prompt among 64 decoders: its TTFT"] == "latency: the run was interrupted 2 s after it began"
    assert rows["Llama-3.1-8B int4, batch 1"] == "its part was not begun"


def test_rows_of_concurrent_parts_are_kept_as_soon_as_one_of_them_ends() -> None:
    one, other = (Stuck(Job((BY_NAME[name],)), left_s=5.0) for name in ("check rows", "check products"))
    row = json.dumps({"row": Row(name="numbers: rms norm", value=1.0).as_dict()}) + "\n"
    outcome, kept = Outcome(), list[tuple[int, int]]()
    recorder = Recorder(outcome, lambda _: None, keep=lambda found: kept.append((len(found.rows), len(found.parts))))
    processes._run([one, other], Script([(one, row), (one, None), (other, None)]), 1.0, recorder)  # type: ignore[arg-type, list-item]
    assert kept == [(1, 1), (1, 2)]


@pytest.mark.skipif(sys.platform != "linux", reason="nobody else tells a process that its parent has ended")
def test_a_part_exits_when_the_run_that_started_it_is_killed() -> None:
    waits = "import os, signal; from bench.parent import end_with_parent; end_with_parent(); print(os.getpid(), flush=True); "
    waits += "signal.pause()"
    starts = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {waits!r}], start_new_session=True).wait()"
    with subprocess.Popen([sys.executable, "-c", starts], cwd=REPO, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        part_ends = os.pidfd_open(int(run.stdout.readline()))
        assert select.select([part_ends], [], [], 0.0)[0] == []
        run.kill()
        assert select.select([part_ends], [], [], 30.0)[0] == [part_ends]
    os.close(part_ends)


@dataclass(eq=False)
class Losing(Stuck):
    """A process that emits a row, loses the device and ends; its successor emits another one."""

    left_s: float = 60.0
    lines: Any = None
    rows: tuple[str, ...] = ("first",)
    status: int = device_lost.STATUS
    done: Sequence[str] = ()
    next: Losing | None = None

    def start_reader(self, lines: Any) -> None:
        self.lines = lines

    def begin(self, facts: dict[str, Any], limit_s: float, done: Sequence[str] = ()) -> None:
        self.done = done
        for name in self.rows:
            self.lines.put((self, json.dumps({"row": Row(name=name).as_dict()}) + "\n"))
        self.lines.put((self, None))

    def successor(self) -> Losing:
        self.next = Losing(self.job, rows=("second",), status=0)
        return self.next

    def close(self) -> tuple[int | None, str]:
        return self.status, "its log"


@pytest.mark.parametrize(
    ("left_s", "rows"), [(processes.RESTART_MIN_S, ["first", "second"]), (processes.RESTART_MIN_S - 1.0, ["first"])]
)
def test_another_process_goes_on_with_what_is_left_where_one_has_lost_the_device(
    left_s: float, rows: list[str], tmp_path: Path
) -> None:
    lines: Any = queue.Queue()
    process, outcome = Losing(Job((BY_NAME["formats"],)), left_s=left_s), Outcome()
    process.start_reader(lines)
    processes._run([process], lines, 1.0, Recorder(outcome, lambda _: None, tmp_path))  # type: ignore[list-item]
    assert [row.name for row in outcome.rows] == rows
    assert outcome.parts[0]["error"] == f"exit status {device_lost.STATUS}: its log"
    assert len({*tmp_path.iterdir()}) == len(outcome.parts) == len(rows)
    if process.next is not None:
        assert process.next.done == ["first"]


@pytest.mark.parametrize(("statuses", "rows"), [([-11, 0], ["first", "second"]), ([-11, -11, 0], ["first", "second"])])
def test_another_process_goes_on_once_where_one_has_crashed(
    statuses: list[int], rows: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(statuses)
    monkeypatch.setattr(Losing, "close", lambda _: (next(left), "its log"))
    lines: Any = queue.Queue()
    process, outcome = Losing(Job((BY_NAME["formats"],))), Outcome()
    process.start_reader(lines)
    processes._run([process], lines, 1.0, Recorder(outcome, lambda _: None))  # type: ignore[list-item]
    assert [row.name for row in outcome.rows] == rows
    assert [part.get("error", "") for part in outcome.parts] == [
        "ended by SIGSEGV: its log" if status else "" for status in statuses[:2]
    ]


@dataclass(eq=False)
class Noted(Stuck):
    """A process that ends as soon as it is told to begin, and notes what is done with it."""

    left_s: float = 5.0
    notes: list[str] = field(default_factory=list)
    lines: Any = None

    def start_reader(self, lines: Any) -> None:
        self.lines = lines

    def begin(self, facts: dict[str, Any], limit_s: float, done: Sequence[str] = ()) -> None:
        self.notes.append(f"{self.job.name} begins")
        self.lines.put((self, None))

    def close(self) -> tuple[int | None, str]:
        return 0, ""


def test_processes_of_a_stage_import_while_the_previous_stage_measures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes: list[str] = []

    def started(job: Job, **_: object) -> Noted:
        notes.append(f"{job.name} starts")
        return Noted(job, notes=notes)

    monkeypatch.setattr(processes, "Process", started)
    monkeypatch.setattr(processes, "_wait_for_imports", lambda *_: notes.append("ready"))
    stages = [[Job((BY_NAME[name],)) for name in names] for names in (["calibrate"], ["check rows", "warm llama"], ["latency"])]
    recorder = Recorder(Outcome(facts={processes.BASE_FACT: 4e12}), lambda _: None)
    processes.run_stages(stages, rehearse=False, total_s=60.0, recorder=recorder)
    assert notes == [
        "calibrate starts", "ready", "check rows starts", "warm llama starts", "calibrate begins",
        "latency starts", "check rows begins", "warm llama begins", "latency begins",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "expected"), [(["warm llama"], [part.WARM_UP_NICENESS]), (["check rows"], []), (["check rows", "warm llama"], [])]
)
def test_a_warm_up_runs_at_lower_priority_than_checks(
    names: list[str], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr("os.nice", asked.append)
    part._lower_priority(names)
    assert asked == expected
