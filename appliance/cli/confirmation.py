"""Asks on a terminal for the name of what a command ends for good. A program, which cannot be asked, says --yes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from appliance.cli.failure import CommandFailed, WrongUsage

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation (for scripts).")]


def needs_terminal(what: str, *, whose: str = "its name") -> None:
    """Raise WrongUsage where nobody can be asked. `what` is the command's effect: "archiving a tenant cannot be undone", and
    `whose` is what is asked for."""
    if sys.stdin is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise WrongUsage(f"{what}: on a terminal {whose} is asked for, elsewhere add --yes")


def ask_for_name(name: str, effect: str) -> None:
    """Tell `effect` and ask for `name` on standard error, as standard output may be read by a program.

    Raises CommandFailed where another name is typed, and typer.Abort at Ctrl-C and at the end of the input.
    """
    sys.stderr.write(f"{effect}\nType the name {name} to confirm: ")
    sys.stderr.flush()
    typed = sys.stdin.readline()
    if not typed:
        raise typer.Abort
    if typed.rstrip("\r\n") != name:
        raise CommandFailed("the name does not match; nothing was changed", code="not_confirmed")
