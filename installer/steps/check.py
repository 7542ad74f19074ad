"""`installer test`: the same environment with the test packages, then the whole suite, or pytest with the given arguments."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from steps import environment
from steps.parts import parts
from steps.place import REPO, VENV, venv_python
from steps.side_by_side import SideBySide, processes, summary

# -u and -v (against the -q of pyproject.toml) let the progress of a part be read while it runs. No cache: parts that end at the
# same time would write the same one.
_WHOLE_SUITE = ("-u", "-m", "pytest", "-v", "-p", "no:cacheprovider")


def run(arguments: Sequence[str]) -> int:
    """Install if needed; then become pytest in the clone's folder, or run the whole suite in parts. Returns its exit status."""
    environment.ensure(environment.profile_for("auto"), with_tests=True)
    sys.stdout.flush()
    python = str(venv_python(VENV))
    if arguments:
        os.chdir(REPO)
        os.execv(python, [python, "-m", "pytest", *arguments])
    return run_suite([python, *_WHOLE_SUITE])


def run_suite(command: Sequence[str]) -> int:
    """Run every part of the suite with `command`; print times and failures. Return 0 if nothing failed, else 1."""
    began_s, parallel_max = time.monotonic(), processes()
    with SideBySide(command, REPO, os.environ, parallel_max) as running:
        suite = parts(REPO)
        print(f"Running the tests in {len(suite)} parts, {parallel_max} at a time ...", flush=True)
        outcomes = running.run(suite)
    print(summary(outcomes, time.monotonic() - began_s, parallel_max), flush=True)
    return 0 if all(outcome.status == 0 for outcome in outcomes) else 1
