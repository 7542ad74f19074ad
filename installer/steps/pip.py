"""Runs pip inside the environment: shows progress, and the relevant output if it fails."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from steps.errors import InstallerError
from steps.paths import venv_python
from steps.progress import Step

_POLL_S = 0.25
_PARALLEL_MAX = 4
_INSTALL = ("-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off")
_LINES_SHOWN = 12
# User settings of pip and Python that would install packages outside the environment.
_MISPLACING = ("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_REQUIRE_VIRTUALENV", "PYTHONPATH", "PYTHONHOME")
_DOWNLOAD = re.compile(r"^\s*Downloading (?P<file>\S+) \((?P<size>[\d.]+) (?P<unit>[kMG]?B)\)")
_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_NETWORK = re.compile(
    r"NewConnectionError|ConnectTimeout|ReadTimeout|Max retries|name resolution|Name or service not known|"
    r"Network is unreachable|Connection refused|ProxyError|ConnectionResetError|Could not fetch URL",
    re.IGNORECASE,
)
_CAUSES: tuple[tuple[re.Pattern[str], str, str], ...] = (
    (
        re.compile(r"No space left on device|Errno 28"),
        "The disk became full while installing packages.",
        "Free some space and run the same command again.",
    ),
    (
        re.compile(r"CERTIFICATE_VERIFY_FAILED|SSLError|certificate verify failed"),
        "The certificate of the package index was rejected.",
        "If a proxy inspects traffic, give pip its certificate (PIP_CERT=/path/to/ca.pem), then run the same command again.",
    ),
    (
        _NETWORK,
        "The package index is unreachable.",
        "Check the network (or set PIP_INDEX_URL, HTTPS_PROXY), then run the same command again.",
    ),
    (
        re.compile(r"No matching distribution found for|Could not find a version that satisfies"),
        "The package index has no build of a locked package for this Python and this machine.",
        "The locks are tested with Python 3.11 and 3.12 on Linux x86_64: start the installer with python3.11 or python3.12.",
    ),
    (
        re.compile(r"Permission denied|Errno 13"),
        "A file could not be written.",
        "Run the installer as the user who owns this folder.",
    ),
)


class PipFailed(InstallerError):
    """pip failed. `missing` is true if the index responded but has no such build."""

    def __init__(self, lines: Sequence[str]) -> None:
        text = "\n".join(lines)
        problem, advice = (
            "Installing packages failed.",
            "Run the same command again; if it fails again, the lines above say why.",
        )
        for pattern, cause, remedy in _CAUSES:
            if pattern.search(text):
                problem, advice = cause, remedy
                break
        super().__init__(problem, advice, relevant(lines))
        self.missing = "No matching distribution found" in text and not _NETWORK.search(text)


def relevant(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the lines of pip's output that explain the failure: its error lines, else its last lines."""
    errors = [line.strip() for line in lines if line.lstrip().startswith(("ERROR", "error:"))]
    shown = errors or [line.rstrip() for line in lines if line.strip() and "is ignored" not in line]
    return tuple(line[:300] for line in shown[-_LINES_SHOWN:])


def num_parallel() -> int:
    """Return the number of pips to run in parallel: unpacking, and in part downloading, are bound by the processor."""
    return min(os.cpu_count() or 1, _PARALLEL_MAX)


def install(venv: Path, commands: Sequence[Sequence[str]], step: Step, *, expected: int) -> None:
    """Run `pip install ARGUMENTS` in `venv` for all `commands` in parallel, reporting progress to `step`. Raises PipFailed for
    the first that fails, and terminates the others.

    No two commands may install the same package. `expected` is the number of packages to install. Downloads go to a folder
    inside `venv`, where their size can be measured, on the disk that was checked, and are removed with it.
    """
    inbox: queue.SimpleQueue[tuple[_Pip, str | None]] = queue.SimpleQueue()
    pips: list[_Pip] = []
    try:
        for number, arguments in enumerate(commands):
            pips.append(_Pip(venv, arguments, venv / "tmp" / str(number), inbox))
        _follow(inbox, len(pips), _Meter(venv, [pip.output for pip in pips], step, expected))
    finally:
        for pip in pips:
            pip.end()


class _PipOutput:
    """The output of one pip, and the progress that it shows."""

    def __init__(self, scratch: Path) -> None:
        self.lines: list[str] = []
        self.num_collected = 0
        self.bytes_wanted = 0
        self.is_unpacking = False
        self._scratch = scratch

    def line(self, line: str) -> None:
        self.lines.append(line)
        if line.startswith(("Collecting ", "Processing ", "Looking in")):
            self.bytes_wanted = 0
            self.num_collected += line.startswith("Collecting ")
        elif line.startswith("Installing collected packages"):
            self.bytes_wanted = 0
            self.is_unpacking = True
        elif match := _DOWNLOAD.match(line):
            self.bytes_wanted = int(float(match["size"]) * _UNITS[match["unit"]])

    def bytes_downloaded(self) -> int:
        """Return the size in bytes of the file being downloaded (the one modified last), 0 if none."""
        newest = (0.0, 0)
        for file in self._scratch.glob("pip-unpack-*/*") if self.bytes_wanted else ():
            try:
                known = file.stat()
            except OSError:
                continue  # pip has just moved it
            newest = max(newest, (known.st_mtime, known.st_size))
        return newest[1]


class _Pip:
    """A running pip with its own download folder. Puts each line of its output into `inbox`, and None at the end."""

    def __init__(
        self, venv: Path, arguments: Sequence[str], scratch: Path, inbox: queue.SimpleQueue[tuple[_Pip, str | None]]
    ) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        self.output = _PipOutput(scratch)
        self.process = subprocess.Popen(
            [str(venv_python(venv)), *_INSTALL, *arguments],
            env=_environment(scratch),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            close_fds=False,  # so that pip inherits the installer's lock
        )
        self._inbox = inbox
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self._inbox.put((self, line.rstrip("\n")))
        self._inbox.put((self, None))

    def end(self) -> None:
        """Terminate pip if it is still running, and wait for its end."""
        self.process.terminate()
        self.process.wait()
        self._reader.join()


def _environment(scratch: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _MISPLACING}
    return {**kept, "TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1", "PIP_ROOT_USER_ACTION": "ignore"}


class _Meter:
    """Shows progress in words, from the output of the pips and the sizes of their download folders."""

    def __init__(self, venv: Path, outputs: Sequence[_PipOutput], step: Step, expected: int) -> None:
        self._venv, self._outputs, self._step, self._expected = venv, outputs, step, expected
        self._before = self._installed()

    def show(self) -> None:
        wanted = sum(output.bytes_wanted for output in self._outputs)
        if all(output.is_unpacking for output in self._outputs):
            several = self._expected > len(self._outputs)
            self._step.detail(f"unpacked {self._installed() - self._before} of {self._expected}" if several else "unpacking")
        elif wanted >= _UNITS["MB"]:
            downloaded = sum(output.bytes_downloaded() for output in self._outputs)
            self._step.detail(f"downloading {downloaded / 1e6:.0f} of {wanted / 1e6:.0f} MB{self._count(', package')}")
        else:
            self._step.detail(f"fetching{self._count()}")

    def _count(self, lead: str = "") -> str:
        collected = sum(output.num_collected for output in self._outputs)
        return f"{lead} {collected} of {self._expected}" if self._expected > 1 else ""

    def _installed(self) -> int:
        return sum(1 for _ in self._venv.glob("lib/python3*/site-packages/*.dist-info"))


def _follow(inbox: queue.SimpleQueue[tuple[_Pip, str | None]], num_running: int, meter: _Meter) -> None:
    """Read the output of all pips to the end, and update the progress line even while they print nothing."""
    while num_running:
        try:
            pip, line = inbox.get(timeout=_POLL_S)
        except queue.Empty:
            meter.show()
            continue
        if line is not None:
            pip.output.line(line)
            meter.show()
        elif pip.process.wait() == 0:
            num_running -= 1
        else:
            raise PipFailed(pip.output.lines)
