"""`installer test`: installs the environment with the test packages, then runs the whole suite, or pytest with arguments."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from steps import environment
from steps.parallel_tests import ParallelTests, processes, summary
from steps.paths import REPO, VENV, venv_python
from steps.suite_parts import suite_parts

# -u and -v (overriding the -q of pyproject.toml) make the progress of a part readable while it runs. No cache, because parallel
# parts would write the same one.
_WHOLE_SUITE = ("-u", "-m", "pytest", "-v", "-p", "no:cacheprovider")


def run(arguments: Sequence[str]) -> int:
    """Install if needed; then replace this process by pytest in the clone, or run the whole suite. Returns the exit status."""
    environment.ensure(environment.profile_for("auto"), with_tests=True)
    sys.stdout.flush()
    python = str(venv_python(VENV))
    if arguments:
        os.chdir(REPO)
        os.execv(python, [python, "-m", "pytest", *arguments])
    return run_suite([python, *_WHOLE_SUITE])


def run_suite(command: Sequence[str]) -> int:
    """Run all parts of the suite with `command`, and print times and failures. Returns 0 if nothing failed, else 1."""
    began_s, parallel_max = time.monotonic(), processes()
    with ParallelTests(command, REPO, os.environ, parallel_max) as running:
        suite = suite_parts(REPO)
        print(f"Running the tests in {len(suite)} parts, {parallel_max} at a time ...", flush=True)
        outcomes = running.run(suite)
    print(summary(outcomes, time.monotonic() - began_s, parallel_max), flush=True)
    return 0 if all(outcome.status == 0 for outcome in outcomes) else 1
