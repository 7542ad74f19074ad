"""The result of a command line that a test runs, and a terminal to run it at."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any, NamedTuple


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
"""Runs a command with these arguments. `at_terminal`: input typed at a terminal; without it there is none, and `piped` is the
input."""
