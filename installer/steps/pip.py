"""Running pip inside the environment: progress while it works, the lines that matter when it fails."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from steps.place import venv_python
from steps.progress import Step
from steps.refusal import Refusal

_POLL_S = 0.25
_LINES_SHOWN = 12
# Settings of a person's own pip that would put packages elsewhere than into the environment.
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
        "The disk became full while packages were installed.",
        "Free some space and run the same command again.",
    ),
    (
        re.compile(r"CERTIFICATE_VERIFY_FAILED|SSLError|certificate verify failed"),
        "The package index's certificate was not accepted.",
        "If a proxy inspects traffic, give pip its certificate (PIP_CERT=/path/to/ca.pem), then run the same command again.",
    ),
    (
        _NETWORK,
        "The package index cannot be reached.",
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


class PipFailed(Refusal):
    """pip ended with an error. `missing` is true when the index answered and simply has no such build."""

    def __init__(self, lines: Sequence[str]) -> None:
        text = "\n".join(lines)
        problem, advice = "Installing packages failed.", "Run the same command again; if it fails again, these lines say why."
        for pattern, cause, remedy in _CAUSES:
            if pattern.search(text):
                problem, advice = cause, remedy
                break
        super().__init__(problem, advice, relevant(lines))
        self.missing = "No matching distribution found" in text and not _NETWORK.search(text)


def relevant(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the lines of pip's output that tell a person why it failed: its errors, else its last words."""
    errors = [line.strip() for line in lines if line.lstrip().startswith(("ERROR", "error:"))]
    shown = errors or [line.rstrip() for line in lines if line.strip() and "is ignored" not in line]
    return tuple(line[:300] for line in shown[-_LINES_SHOWN:])


def install(venv: Path, arguments: Sequence[str], step: Step, *, expected: int) -> None:
    """Run `pip install ARGUMENTS` in `venv`, telling `step` how far it is. Raises PipFailed.

    `expected` is the number of packages that will be installed. Downloads go through a folder inside `venv`, so that
    they can be measured, lie on the disk that was checked, and vanish with it.
    """
    scratch = venv / "tmp"
    scratch.mkdir(exist_ok=True)
    command = [
        str(venv_python(venv)),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-input",
        "--progress-bar",
        "off",
    ]
    process = subprocess.Popen(
        [*command, *arguments],
        env=_environment(scratch),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        close_fds=False,  # the installer's lock goes along
    )
    lines: list[str] = []
    try:
        _follow(process, lines, _Meter(venv, scratch, step, expected))
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if process.returncode != 0:
        raise PipFailed(lines)


def _environment(scratch: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _MISPLACING}
    return {**kept, "TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1", "PIP_ROOT_USER_ACTION": "ignore"}


class _Meter:
    """Turns pip's output and the growing folders into a few words."""

    def __init__(self, venv: Path, scratch: Path, step: Step, expected: int) -> None:
        self._venv, self._scratch, self._step, self._expected = venv, scratch, step, expected
        self._collected = 0
        self._bytes_wanted = 0
        self._installing = False
        self._before = self._installed()

    def line(self, line: str) -> None:
        if line.startswith(("Collecting ", "Processing ", "Looking in")):
            self._bytes_wanted = 0
            self._collected += line.startswith("Collecting ")
        elif line.startswith("Installing collected packages"):
            self._installing = True
        elif match := _DOWNLOAD.match(line):
            self._bytes_wanted = int(float(match["size"]) * _UNITS[match["unit"]])

    def show(self) -> None:
        if self._installing:
            self._step.detail(
                f"unpacked {self._installed() - self._before} of {self._expected}" if self._expected > 1 else "unpacking"
            )
        elif self._bytes_wanted >= _UNITS["MB"]:
            self._step.detail(
                f"downloading {self._downloaded() / 1e6:.0f} of {self._bytes_wanted / 1e6:.0f} MB{self._count(', package')}"
            )
        else:
            self._step.detail(f"fetching{self._count()}")

    def _count(self, lead: str = "") -> str:
        return f"{lead} {self._collected} of {self._expected}" if self._expected > 1 else ""

    def _installed(self) -> int:
        return sum(1 for _ in self._venv.glob("lib/python3*/site-packages/*.dist-info"))

    def _downloaded(self) -> int:
        """Return the size of the file that pip is writing now: the one that was touched last."""
        newest = (0.0, 0)
        for file in self._scratch.glob("pip-unpack-*/*"):
            try:
                known = file.stat()
            except OSError:
                continue  # pip moved it away between listing and asking
            newest = max(newest, (known.st_mtime, known.st_size))
        return newest[1]


def _follow(process: subprocess.Popen[str], lines: list[str], meter: _Meter) -> None:
    """Read the output to its end; a thread reads so that the line on the terminal moves while pip is silent."""
    inbox: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    output = process.stdout
    assert output is not None

    def read() -> None:
        for line in output:
            inbox.put(line.rstrip("\n"))
        inbox.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = inbox.get(timeout=_POLL_S)
        except queue.Empty:
            meter.show()
            continue
        if line is None:
            process.wait()
            return
        lines.append(line)
        meter.line(line)
        meter.show()
