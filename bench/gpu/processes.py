"""Runs the parts of a plan in separate processes, kills those that take too long, and collects their output."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from bench.gpu import device_lost
from bench.gpu.plan import Job, Stage, allotted_s
from bench.gpu.rows import Row
from bench.rows import TREE
from engine.environment import FP_FUSION

HEAD_CHARS, TAIL_CHARS = 2000, 6000
"""Characters of each part's log in the result: its head, where engines start, and its tail. `--logs` writes the whole log."""
BASE_FACT = "bandwidth"
"""The calibrated figure that every part after the first divides by."""
REHEARSAL_LIMIT_FACTOR = 8.0
"""Factor on the time limits of parts in a rehearsal, which may share two busy cores with everything else."""
STAGE_MIN_S = 8.0
"""With less time left than this, a stage is not begun."""
NOT_BEGUN = "not begun"
RESTART_MIN_S = 20.0
"""With less of its time left than this, a part whose process has lost the device or crashed is not continued by another one."""
IMPORT_S = 120.0
"""Time that the first part may take to import before its own time begins; no other part imports meanwhile."""
TF32_VARIABLES = ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE")
"""A container image may set these: float32 products would then have 10-bit mantissas, even those that checks treat as exact."""
KILL_WAIT_S = 10.0
"""Time for a process to end after it was killed or closed its output. A process that hangs in the driver never ends; the run
continues without it, and waits for several such processes at the same time."""


@dataclass(slots=True)
class Outcome:
    """Everything that a run produced: rows in order of arrival, facts, and a record of each part."""

    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    parts: list[dict[str, Any]] = field(default_factory=list)


class Process:
    """The process of one job. It imports at once and measures after `begin`."""

    def __init__(self, job: Job, *, rehearse: bool, environment: dict[str, str]) -> None:
        self.job = job
        self._rehearse, self._environment = rehearse, environment
        self.allowed_s = job.limit_s * (REHEARSAL_LIMIT_FACTOR if rehearse else 1.0)
        self.limit_s = 0.0
        self.grace_s = 0.0
        self.timed_out = False
        self.abandon_reason = ""
        self._is_read = False
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - `close` closes it
        arguments = [sys.executable, "-m", "bench.gpu.part", *(part.name for part in job.parts)]
        self._process = subprocess.Popen(
            arguments + (["--rehearse"] if rehearse else []),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self._begun_s = 0.0
        self._killed_s: float | None = None

    def start_reader(self, lines: Lines) -> None:
        """Start a thread that puts output lines into `lines`, and None at the end of the output."""
        self._is_read = True
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()

    def successor(self) -> Process:
        """Another process of the same job."""
        return Process(self.job, rehearse=self._rehearse, environment=self._environment)

    def begin(self, facts: dict[str, Any], limit_s: float, done: Sequence[str] = ()) -> None:
        """Let it measure all rows but those that are `done`."""
        self.limit_s, self._begun_s = limit_s, time.monotonic()
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(BrokenPipeError):  # it ended during its imports; its log says why
            stdin.write(json.dumps({"facts": facts, "until_s": self._begun_s + limit_s, "done": list(done)}) + "\n")
            stdin.close()

    def _read(self, lines: Lines) -> None:
        stdout: TextIO | None = self._process.stdout  # type: ignore[assignment]
        assert stdout is not None
        with stdout:
            for line in stdout:
                lines.put((self, line))
        lines.put((self, None))

    @property
    def left_s(self) -> float:
        return self._begun_s + self.limit_s + self.grace_s - time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begun_s

    def time_out(self) -> None:
        """Kill it at its time limit, and allow KILL_WAIT_S for its output to end as well."""
        self.timed_out = True
        self.kill()
        self.grace_s = self.elapsed_s - self.limit_s + KILL_WAIT_S

    def kill(self) -> None:
        """Kill it and the processes that it started, without waiting for their end: `close` does."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._killed_s = time.monotonic()

    def close(self) -> tuple[int | None, str]:
        """Return its exit status (None if it does not end) and its log."""
        status = self._wait_for_exit()
        for pipe in (self._process.stdin, None if self._is_read else self._process.stdout):  # the reader closes its own pipe
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._log.seek(0)
        log_text = self._log.read()
        self._log.close()
        return status, log_text

    def _wait_for_exit(self) -> int | None:
        now_s = time.monotonic()
        since_s = now_s if self._killed_s is None else self._killed_s
        try:
            status = self._process.wait(timeout=max(0.0, since_s + KILL_WAIT_S - now_s))
        except subprocess.TimeoutExpired:
            self.abandon_reason = f"its process does not end, {KILL_WAIT_S:g} s after it was killed or closed its output"
            return None
        self.abandon_reason = ""
        return status


@dataclass(frozen=True, slots=True)
class Recorder:
    """Collects the messages of processes in `outcome`. `show` gets a line for each row and each part that ends; `logs` is the
    directory for everything else that parts print; `keep` receives the outcome so far after each part that has begun."""

    outcome: Outcome
    show: Callable[[str], None]
    logs: Path | None = None
    keep: Callable[[Outcome], None] = lambda _: None

    def add_line(self, process: Process, line: str) -> None:
        if not line.endswith("\n"):
            return  # cut off when the process was killed
        message = json.loads(line)
        if "row" in message:
            message["row"]["came_s"] = round(process.elapsed_s, 1)
            self.outcome.rows.append(Row(**message["row"]))
            self.show(json.dumps({key: value for key, value in message["row"].items() if value not in (None, "", [], {})}))
        elif "facts" in message:
            self.outcome.facts.update(message["facts"])

    def add_end(self, process: Process, *, interrupted: bool = False) -> int | None:
        """Close a process and record its part; return its exit status. `interrupted`: it was killed with the run."""
        elapsed_s = round(process.elapsed_s, 2)
        status, log_text = process.close()
        log_text = log_text.replace(f"{TREE}/", "")
        record: dict[str, Any] = {**_part_record(process.job), "s": elapsed_s, "limit_s": round(process.limit_s, 1)}
        if interrupted:
            record["error"] = f"the run was interrupted {elapsed_s:.0f} s after it began"
        elif process.timed_out:
            record["error"] = f"ended after its limit of {process.limit_s:g} s"
            if process.abandon_reason:
                record["error"] += f"; {process.abandon_reason}"
        elif status is None:
            record["error"] = process.abandon_reason
        elif status:
            record["error"] = f"{_describe_status(status)}: {_last_line(log_text)}"
        record["log"] = shorten_log(log_text)
        self.outcome.parts.append(record)
        if self.logs is not None:
            self.logs.mkdir(parents=True, exist_ok=True)
            number = sum(part["part"] == process.job.name for part in self.outcome.parts)
            name = f"{process.job.name} {number}" if number > 1 else process.job.name
            (self.logs / f"{name.replace(' ', '-')}.txt").write_text(log_text, "utf-8")
        self.show(f"-- {process.job.name}: {elapsed_s} s{', ' + record['error'] if 'error' in record else ''}")
        self.keep(self.outcome)
        return status

    def add_skipped(self, process: Process, reason: str) -> None:
        self.outcome.parts.append({**_part_record(process.job), "error": f"{NOT_BEGUN}: {reason}"})
        self.show(f"-- {process.job.name}: {NOT_BEGUN}, {reason}")


def run_stages(
    stages: Sequence[Stage],
    *,
    rehearse: bool,
    total_s: float,
    recorder: Recorder,
) -> None:
    """Run all stages. The next stage's processes import while the current one measures; while the first imports, no other does,
    because the run would lose that time. If the run is interrupted, `recorder` has what there was."""
    outcome = recorder.outcome
    environment = _environment(rehearse)
    end_s = time.monotonic() + total_s
    prepared: list[Process] = []
    try:
        for index, stage in enumerate(stages):
            processes = prepared or [Process(job, rehearse=rehearse, environment=environment) for job in stage]
            lines = _start_readers(processes)
            if not index:
                _wait_for_imports(processes, lines)
            prepared = []
            if not rehearse and index + 1 < len(stages):
                prepared = [Process(job, rehearse=rehearse, environment=environment) for job in stages[index + 1]]
            left_s = end_s - time.monotonic()
            if index and BASE_FACT not in outcome.facts:
                _skip(processes, recorder, "the card could not be calibrated")
            elif left_s < STAGE_MIN_S:
                _skip(processes, recorder, "the time of the run was used up")
            else:
                _run(processes, lines, allotted_s(stages[index:], left_s), recorder)
    finally:
        _end(prepared)


Lines = queue.Queue[tuple[Process, str | None]]


def _start_readers(processes: Sequence[Process]) -> Lines:
    lines: Lines = queue.Queue()
    for process in processes:
        process.start_reader(lines)
    return lines


def _wait_for_imports(processes: Sequence[Process], lines: Lines) -> None:
    """Wait until each process has printed its first line, which says that it is ready, or has ended."""
    missing, end_s, first = set(processes), time.monotonic() + IMPORT_S, []
    while missing and (left_s := end_s - time.monotonic()) > 0:
        with suppress(queue.Empty):
            first.append(lines.get(timeout=left_s))
            missing.discard(first[-1][0])
    for line in first:
        lines.put(line)


def _environment(rehearse: bool) -> dict[str, str]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", FP_FUSION: "1"}
    for name in ("TRITON_INTERPRET", *TF32_VARIABLES):
        environment.pop(name, None)
    if rehearse:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return environment


def _end(processes: Sequence[Process]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.close()


def _skip(processes: Sequence[Process], recorder: Recorder, reason: str) -> None:
    _end(processes)
    for process in processes:
        recorder.add_skipped(process, reason)


def _run(processes: Sequence[Process], lines: Lines, allotted_s: float, recorder: Recorder) -> None:
    """Let all processes measure at the same time; return when each has ended or was abandoned."""
    for process in processes:
        process.begin(recorder.outcome.facts, min(process.allowed_s, allotted_s))
    running, crashed = list(processes), set[Job]()
    try:
        while running:
            soonest_s = min(process.left_s for process in running)
            try:
                process, line = lines.get(timeout=max(0.05, soonest_s))
            except queue.Empty:
                for late in [process for process in running if process.left_s <= 0]:
                    if not late.timed_out:
                        late.time_out()  # its end then arrives as a line
                    else:  # another process still holds its output open
                        running.remove(late)
                        recorder.add_end(late)
                continue
            if process not in running:
                continue  # it was abandoned before its output ended
            if line is None:
                running.remove(process)
                status = recorder.add_end(process)
                has_crashed = status is not None and status < 0 and process.job not in crashed
                if has_crashed:
                    crashed.add(process.job)  # the row under way is measured again, and may end the next process too
                if (has_crashed or status == device_lost.STATUS) and process.left_s >= RESTART_MIN_S:
                    running.append(_continued(process, lines, recorder))
            else:
                recorder.add_line(process, line)
    except BaseException:  # the run is interrupted: write the rows before waiting for processes to end
        recorder.keep(recorder.outcome)
        for process in running:
            process.kill()
        for process in running:
            recorder.add_end(process, interrupted=True)
        raise


def _continued(process: Process, lines: Lines, recorder: Recorder) -> Process:
    """Another process for the rows of a part that are left when its process has lost the device or crashed."""
    successor = process.successor()
    successor.start_reader(lines)
    successor.begin(recorder.outcome.facts, process.left_s, [row.name for row in recorder.outcome.rows])
    return successor


def shorten_log(text: str) -> str:
    """The head and tail of a log."""
    left_out = len(text) - HEAD_CHARS - TAIL_CHARS
    return text if left_out <= 0 else f"{text[:HEAD_CHARS]}\n… {left_out} characters …\n{text[-TAIL_CHARS:]}"


def _part_record(job: Job) -> dict[str, Any]:
    return {"part": job.name, "targets": sorted({part.target for part in job.parts})}


def _describe_status(status: int) -> str:
    """`exit status 1`, `ended by SIGSEGV`"""
    if status >= 0:
        return f"exit status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    return f"ended by {name}" + (", as by the system when main memory is used up" if -status == signal.SIGKILL else "")


def _last_line(log_text: str) -> str:
    """The last line of a log or, of a crash, where the thread was that crashed: behind it faulthandler lists modules."""
    if "Fatal Python error: " in log_text:
        stack = log_text.rpartition("Fatal Python error: ")[2].rpartition("\nCurrent thread ")[2]
        return next((line.strip() for line in stack.splitlines() if line.startswith("  File ")), "no Python code ran")
    return next((line for line in reversed(log_text.splitlines()) if line.strip()), "no output")
