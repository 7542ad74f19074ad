"""Runs the parts of the test suite in parallel, one process each, and reports results and times.

Progress is a live line on a terminal, and a line every REPORT_EVERY_S elsewhere. Failed tests are named as soon as their part
ends, and reported in full at the end.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from steps.suite_parts import Part

PROCESSORS_MAX = 4  # each part may start an appliance, a browser or a database server
POLL_S = 0.1
REPORT_EVERY_S = 30.0
END_DEADLINE_S = 30.0  # for an interrupted part to stop the processes that it has started
_PERCENT = re.compile(r"\[ *(\d+)%\]")
_SUMMARY = re.compile(r"^(?:=+ )?(\d+ \w+(?:, \d+ \w+)*) in [\d.]+s", re.MULTILINE)
_RESULTS = ("failed", "error", "passed", "skipped", "xfailed", "xpassed", "warning")
_COUNT = re.compile(rf"(\d+) ({'|'.join(_RESULTS)})")
_REPORT = re.compile(r"^=+ (?:FAILURES|ERRORS|short test summary info) =+$", re.MULTILINE)
_FAILED = re.compile(r"^(?:FAILED|ERROR) .*", re.MULTILINE)


def processes() -> int:
    """Return the number of parts to run in parallel: one per processor, up to PROCESSORS_MAX, plus one to use idle time."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, PROCESSORS_MAX) + 1


@dataclass(frozen=True)
class Outcome:
    """The result of a part. `cpu_s` includes its child processes that it waited for, but not a database server."""

    part: Part
    status: int
    wall_s: float
    cpu_s: float
    output: str

    @property
    def counts(self) -> Counter[str]:
        """Test counts by result, from pytest's summary. It may not be the last line, because libraries print at exit."""
        summaries = _SUMMARY.findall(self.output)
        return Counter({word: int(number) for number, word in _COUNT.findall(summaries[-1])} if summaries else {})

    def line(self) -> str:
        """Return the result as one line."""
        results = ", ".join(f"{number} {word}" for word, number in self.counts.items()) or "no tests were run"
        if self.status in (0, 1):
            ended = ""
        elif self.status < 0:
            ended = f"; ended by signal {-self.status}"
        else:
            ended = f"; status {self.status}"
        return f"{self.part.name}: {results}{ended} ({self.wall_s:.0f} s)"

    def failed(self) -> list[str]:
        """Return the lines that name failed tests."""
        return _FAILED.findall(self.output)

    def report(self) -> str:
        """Return pytest's report of failures, or the whole output if there is no report."""
        begin = _REPORT.search(self.output)
        return self.output[begin.start() :] if begin else self.output


@dataclass(frozen=True)
class Running:
    """A running part. Its output goes to a file, so that it never blocks on a full pipe."""

    part: Part
    process: subprocess.Popen[bytes]
    output: Path
    began_s: float = field(default_factory=time.monotonic)

    def percent(self) -> int:
        """Return the progress that pytest last printed."""
        percents = _PERCENT.findall(self.output.read_text("utf-8", "replace"))
        return int(percents[-1]) if percents else 0

    def outcome(self) -> Outcome | None:
        """Return the result, None while it runs."""
        pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if pid == 0:
            return None
        self.process.returncode = os.waitstatus_to_exitcode(status)
        took_s = time.monotonic() - self.began_s
        output = self.output.read_text("utf-8", "replace")
        return Outcome(self.part, self.process.returncode, took_s, usage.ru_utime + usage.ru_stime, output)


class ParallelTests:
    """Runs at most `parallel_max` parts at a time. Use as a context manager: no part is running when it exits."""

    def __init__(self, command: Sequence[str], folder: Path, environ: Mapping[str, str], parallel_max: int) -> None:
        self._command = command
        self._folder = folder
        # Parts share the processors, so OpenMP is limited to one thread per process. Bytecode is written, because the parts and
        # the hundreds of processes that tests start import the same modules.
        self._environ = {**({"OMP_NUM_THREADS": "1"} if parallel_max > 1 else {}), **environ}
        self._environ.pop("PYTHONDONTWRITEBYTECODE", None)
        self._parallel_max = parallel_max
        self._outputs = tempfile.TemporaryDirectory(prefix="gatehouse-tests-")
        self._running: list[Running] = []
        self._reported_s = self._began_s = time.monotonic()

    def __enter__(self) -> ParallelTests:
        # Background jobs of a shell ignore SIGINT, and the parts would inherit that; but SIGINT is used to stop them.
        self._on_interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._clear_line()
        for running in self._running:
            with suppress(ProcessLookupError):
                running.process.send_signal(signal.SIGINT)  # pytest then finalises its fixtures
        try:
            for running in self._running:
                with suppress(subprocess.TimeoutExpired):
                    running.process.wait(END_DEADLINE_S)
        finally:
            for running in self._running:
                with suppress(ProcessLookupError):
                    os.killpg(running.process.pid, signal.SIGKILL)
            self._outputs.cleanup()
            signal.signal(signal.SIGINT, self._on_interrupt)

    def run(self, parts: Sequence[Part]) -> list[Outcome]:
        """Run `parts`, started in the given order, and return their results in the order of completion."""
        waiting, outcomes = list(parts), []
        while waiting or self._running:
            while waiting and len(self._running) < self._parallel_max:
                self._running.append(self._start(waiting.pop(0)))
            for running in list(self._running):
                if (outcome := running.outcome()) is not None:
                    self._running.remove(running)
                    outcomes.append(outcome)
                    self._print_line("\n  ".join([outcome.line(), *outcome.failed()]))
            self._show_progress(len(waiting))
            time.sleep(POLL_S)
        return outcomes

    def _start(self, part: Part) -> Running:
        output = Path(self._outputs.name, part.name)
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*self._command, *part.files],
                cwd=self._folder,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that Ctrl-C reaches it only through us
            )
        return Running(part, process, output)

    def _show_progress(self, num_waiting: int) -> None:
        now_s = time.monotonic()
        live = sys.stdout.isatty()
        if not self._running or now_s - self._reported_s < (1.0 if live else REPORT_EVERY_S):
            return
        self._reported_s = now_s
        shares = ", ".join(f"{running.part.name} {running.percent()} %" for running in self._running)
        line = f"{clock(now_s - self._began_s)}  {shares}; {num_waiting} waiting"
        sys.stdout.write(f"\r\x1b[K{line}" if live else f"{line}\n")
        sys.stdout.flush()

    def _print_line(self, line: str) -> None:
        self._clear_line()
        print(f"{clock(time.monotonic() - self._began_s)}  {line}", flush=True)

    def _clear_line(self) -> None:
        if sys.stdout.isatty():
            sys.stdout.write("\r\x1b[K")
            sys.stdout.flush()


def clock(seconds: float) -> str:
    """Return a duration as MM:SS."""
    return f"{int(seconds) // 60:2d}:{int(seconds) % 60:02d}"


def summary(outcomes: Sequence[Outcome], wall_s: float, parallel_max: int) -> str:
    """Return the times of the parts, then all failures in full, then one line with the overall result."""
    longest_first = sorted(outcomes, key=lambda outcome: -outcome.wall_s)
    counts = sum((outcome.counts for outcome in outcomes), Counter[str]())
    lines = ["", f"{'part':20}{'tests':>7}{'wall s':>8}{'CPU s':>8}"]
    for outcome in longest_first:
        lines.append(f"{outcome.part.name:20}{_num_tests(outcome.counts):7}{outcome.wall_s:8.0f}{outcome.cpu_s:8.0f}")
    cpu_s = sum(outcome.cpu_s for outcome in outcomes)
    lines.append(f"{f'{parallel_max} at a time':20}{_num_tests(counts):7}{wall_s:8.0f}{cpu_s:8.0f}")
    failing = [outcome for outcome in outcomes if outcome.status != 0]
    for outcome in failing:
        lines += ["", f"##### {outcome.line()}", outcome.report().rstrip()]
    results = ", ".join(f"{counts[word]} {word}" for word in _RESULTS if word in counts)
    lines += ["", f"{results} in {clock(wall_s).strip()}" + "".join(f"; {outcome.part.name} failed" for outcome in failing)]
    return "\n".join(lines)


def _num_tests(counts: Counter[str]) -> int:
    return sum(number for word, number in counts.items() if word != "warning")
