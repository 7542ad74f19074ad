"""Before a command ends something for good, asks on a terminal for its name. A program cannot be asked and passes --yes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from appliance.cli.failure import CommandFailed, WrongUsage

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation (for scripts).")]


def needs_terminal(what: str, *, expected: str = "its name") -> None:
    """Raise WrongUsage if there is no terminal. `what` is the command's effect, such as "archiving a tenant cannot be undone";
    `expected` says which name is asked for."""
    if sys.stdin is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise WrongUsage(f"{what}: on a terminal {expected} is asked for, elsewhere add --yes")


def ask_for_name(name: str, effect: str) -> None:
    """Print `effect` and ask for `name` on standard error, as a program may read standard output.

    Raises CommandFailed if another name is typed, and typer.Abort at the end of the input.
    """
    sys.stderr.write(f"{effect}\nType the name {name} to confirm: ")
    sys.stderr.flush()
    typed = sys.stdin.readline()
    if not typed:
        raise typer.Abort
    if typed.rstrip("\r\n") != name:
        raise CommandFailed("the name does not match; nothing was changed", code="not_confirmed")
