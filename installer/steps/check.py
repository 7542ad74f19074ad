"""`installer test`: the same environment with the test packages, then pytest with whatever arguments were given."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from steps import environment
from steps.place import REPO, VENV, venv_python


def run(arguments: Sequence[str]) -> int:
    """Install if needed, then become pytest in the clone's folder; its exit status is ours."""
    environment.ensure(environment.profile_for("auto"), with_tests=True)
    sys.stdout.flush()
    os.chdir(REPO)
    command = [str(venv_python(VENV)), "-m", "pytest", *arguments]
    os.execv(command[0], command)
