"""Confirmation of irreversible commands: the user types a name on a terminal; scripts pass --yes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from appliance.cli.failure import CommandFailed, WrongUsage

Yes = Annotated[bool, typer.Option("--yes", help="Skip the confirmation, for scripts.")]


def require_terminal(what: str, *, expected: str = "its name") -> None:
    """Raise WrongUsage if there is no terminal. `what` is the command's effect, such as "archiving a tenant cannot be undone";
    `expected` is the name to type."""
    if sys.stdin is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise WrongUsage(f"{what}: run it on a terminal and type {expected}, or add --yes")


def ask_for_name(name: str, effect: str) -> None:
    """Print `effect` and prompt for `name` on standard error, because standard output may be piped.

    Raises CommandFailed if another name is typed, and typer.Abort at end of input.
    """
    sys.stderr.write(f"{effect}\nType the name {name} to confirm: ")
    sys.stderr.flush()
    typed = sys.stdin.readline()
    if not typed:
        raise typer.Abort
    if typed.rstrip("\r\n") != name:
        raise CommandFailed("the name does not match; nothing was changed", code="not_confirmed")
