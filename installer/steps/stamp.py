"""The state of `.venv`: a stamp file is written last, so that later starts are fast and broken environments are detected.

An environment is in one of these states:
  absent   no `.venv`, or an empty folder
  foreign  a `.venv` without our marker files: not ours, never touched
  broken   the marker `incomplete` exists (interrupted run), or its interpreter does not work
  stale    complete, but for other lock files, another path or another Python
  untested complete and current, but the requested test packages are missing or outdated
  ready    complete and current
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from steps.locks import Lock
from steps.paths import venv_python

FORMAT = 1
STAMP = "gatehouse.json"
INCOMPLETE = "incomplete"
_ASK_VERSION = "import platform; print(platform.python_version())"


@dataclass(frozen=True)
class Stamp:
    """The inputs of a complete environment. `test_digest` is empty if the test packages are not installed."""

    place: str
    python: str
    profile: str
    run_digest: str
    test_digest: str = ""
    format: int = FORMAT


def interpreter_version(venv: Path) -> str | None:
    """Return the version of the environment's own interpreter, None if it does not run."""
    try:
        answer = subprocess.run(
            [venv_python(venv), "-c", _ASK_VERSION], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def read_stamp(venv: Path) -> Stamp | None:
    """Return the stamp of `venv`, None if there is none or it is invalid."""
    try:
        return Stamp(**json.loads((venv / STAMP).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_stamp(venv: Path, stamp: Stamp) -> None:
    """Mark `venv` as complete: write the stamp atomically, then remove the marker `incomplete`."""
    fresh = venv / (STAMP + ".new")
    fresh.write_text(json.dumps(asdict(stamp), indent=1) + "\n", "utf-8")
    fresh.replace(venv / STAMP)
    (venv / INCOMPLETE).unlink(missing_ok=True)


def mark_incomplete(venv: Path) -> None:
    """Create the marker `incomplete`, before anything else is written to `venv`."""
    venv.mkdir(exist_ok=True)
    (venv / INCOMPLETE).write_text("The installer is working here or was interrupted. It can be started again.\n", "utf-8")


def state(venv: Path, run: Lock, test: Lock | None) -> str:
    """Return the state of `venv`, as listed in the module docstring."""
    if not venv.is_symlink() and (not venv.exists() or (venv.is_dir() and not any(venv.iterdir()))):
        return "absent"
    if (venv / INCOMPLETE).exists():
        return "broken"
    stamp = read_stamp(venv)
    if stamp is None:
        return "foreign"
    version = interpreter_version(venv)
    if version is None:
        return "broken"
    wanted = (FORMAT, str(venv), version.rpartition(".")[0], run.profile, run.digest)
    if (stamp.format, stamp.place, stamp.python.rpartition(".")[0], stamp.profile, stamp.run_digest) != wanted:
        return "stale"
    if test is not None and stamp.test_digest != test.digest:
        return "untested"
    return "ready"
