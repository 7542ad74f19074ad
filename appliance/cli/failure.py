"""The exception of the command line: a message for people and a code for programs."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any


class CommandFailed(Exception):
    """A command failed. `status` is the exit status: 1, or 2 for wrong usage. `done`: what --json prints beside the error, if
    a part of the work was done."""

    def __init__(self, message: str, *, code: str = "failed", status: int = 1, done: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        self.done = done


class WrongUsage(CommandFailed):
    """A command was called with wrong arguments."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="usage", status=2)


def exit_status(http_status: int) -> int:
    """Return the exit status for an HTTP error status: 2 (wrong usage) for 400, else 1."""
    return 2 if http_status == HTTPStatus.BAD_REQUEST else 1
