"""Every command of `gatehouse` that the documentation shows exists, with its options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from tests.support.parsed_commands import parsed_command

REPO = Path(__file__).resolve().parents[2]
PAGES = [*sorted((REPO / "docs").glob("*.md")), REPO / "README.md", REPO / "SECURITY.md", *(REPO / "docs").glob("prometheus/*")]
COMMAND = re.compile(r"`(?:\S*/)?gatehouse ([^`\n]+)`|^ *(?:\S*/)?gatehouse ([a-z][^\n]*)$", re.MULTILINE)
REST_OF_LINE = re.compile(r" +(#|[|>] ).*")
# The text may name a command without its arguments, or a group alone.
INCOMPLETE = {"MissingParameter", "BadOptionUsage", "NoArgsIsHelpError"}


def commands(page: Path) -> list[str]:
    found = [quoted or shown for quoted, shown in COMMAND.findall(page.read_text("utf-8"))]
    return [REST_OF_LINE.sub("", command).replace("[", "").replace("]", "") for command in found]


def problem(command: str) -> str | None:
    """Return what is wrong with a command line."""
    try:
        parsed_command(shlex.split(command))
    except typer.Exit:  # it shows the help
        return None
    except typer.TyperException as error:
        return None if type(error).__name__ in INCOMPLETE else f"gatehouse {command}: {error}"
    return None


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_the_commands_of_a_page_exist(page: Path) -> None:
    assert not [found for command in commands(page) if (found := problem(command))]


@pytest.mark.parametrize("command", ["db chek", "db check --quick", "chek"])
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    assert "No such" in (problem(command) or "")
