"""`installer up`: checks the settings, installs what is missing, then executes the appliance."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from steps import environment, machine, preflight
from steps.choices import choose
from steps.paths import VENV, venv_python

_PASSED_ON = ("host", "port", "database", "device")


def run(options: argparse.Namespace) -> int:
    """Install if needed, then start in the foreground. Does not return on success: the appliance replaces this process."""
    given = vars(options)
    choices = choose(given, os.environ)
    preflight.check(choices)
    profile = environment.profile_for(choices.device)
    environment.ensure(profile, with_tests=False)
    _exec(serve_command(given))


def _exec(arguments: list[str]) -> NoReturn:
    """Replace this process by the `gatehouse` command, so that signals and the exit status need no forwarding."""
    sys.stdout.flush()
    python = str(venv_python(VENV))
    # Safe path: a folder in the current directory must not shadow one of our packages.
    os.execve(python, [python, "-m", "appliance.cli.main", *arguments], {**os.environ, "PYTHONSAFEPATH": "1"})


def serve_command(given: dict[str, object]) -> list[str]:
    """Return the arguments of `gatehouse`, with absolute paths. Options not given are left to its settings."""
    command = ["serve"]
    for name in _PASSED_ON:
        if given.get(name) is not None:
            command += [f"--{name}", str(given[name])]
    if given.get("data_dir"):
        command += ["--data-dir", os.path.abspath(os.path.expanduser(str(given["data_dir"])))]
    models = given.get("model") or []
    assert isinstance(models, list)
    for model in models:
        path = Path(str(model)).expanduser()
        command += ["--model", str(path.absolute()) if path.exists() else str(model)]
    return command


def doctor() -> int:
    """Print the state of this machine and of the environment, then run `gatehouse doctor`."""
    machine.check_interpreter()
    print(machine.describe_interpreter())
    print(f"free disk space at {VENV.parent}: {machine.free_bytes(VENV) // machine.MIB} MiB")
    profile = environment.profile_for("auto")
    print("NVIDIA GPU: found" if profile == "gpu" else "no NVIDIA GPU: models run on the CPU")
    state = environment.describe(profile)
    print(f"environment {VENV}: {state}")
    if not state.startswith("ready"):
        print("To install and start: python3 installer up")
        return 1
    _exec(["doctor"])
