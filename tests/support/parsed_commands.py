"""Parses command lines of `gatehouse` without running them: whether those in the documentation exist."""

from __future__ import annotations

from functools import cache
from typing import Any

import typer.main

from appliance.cli.main import build


def parsed_command(words: list[str]) -> str:
    """Return the name of the command that `words`, the arguments of `gatehouse`, call, such as `db check`.

    An unknown command, option or missing argument raises an error of typer.
    """
    group = _all_commands()
    context, names = group.make_context("gatehouse", list(words)), []
    while True:
        name, command, words = group.resolve_command(context, list(words))
        context = command.make_context(name, list(words), parent=context)
        names.append(name)
        if not hasattr(command, "resolve_command"):
            return " ".join(names)
        group = command


@cache
def _all_commands() -> Any:
    return typer.main.get_command(build())
