"""Runs command lines on a stopped appliance that has the tenant `bob`."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from appliance.cli.main import main


class CommandResult(NamedTuple):
    """Exit status and output of a command line."""

    status: int
    out: str
    err: str

    def json(self) -> Any:
        """The output of --json, also of a failed command."""
        return json.loads(self.out)

    def done(self) -> Any:
        """The output of --json; fails unless the command succeeded."""
        assert self.status == 0, self.out + self.err
        return self.json()


class Terminal(io.StringIO):
    """Standard input from a terminal."""

    def isatty(self) -> bool:
        return True


Run = Callable[..., CommandResult]


def runner_in_process(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command with the environment as it is."""

    def run(*arguments: str) -> CommandResult:
        status = main(list(arguments))
        return CommandResult(status, *capsys.readouterr())

    return run


def command_runner(folder: Path, database: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command on a copy of `database` in `folder`. `at_terminal`: input typed at a terminal;
    without it there is no terminal."""
    for name in [name for name in os.environ if name.startswith("GATEHOUSE_")]:
        monkeypatch.delenv(name)
    shutil.copyfile(database, folder / "gatehouse.db")
    monkeypatch.setenv("GATEHOUSE_DATA_DIR", str(folder))
    run_here = runner_in_process(capsys)

    def run(*arguments: str, at_terminal: str | None = None) -> CommandResult:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.StringIO() if at_terminal is None else Terminal(at_terminal))
            patch.setattr(sys.stderr, "isatty", lambda: at_terminal is not None)
            return run_here(*arguments)

    assert run("tenants", "create", "bob").status == 0
    return run
