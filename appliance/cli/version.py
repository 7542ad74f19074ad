"""`gatehouse version` and `gatehouse --version`."""

from __future__ import annotations

import platform
import sys
from typing import Annotated

import typer

from appliance.base.version import current_version
from appliance.cli.options import AsJson


def version(as_json: AsJson = False) -> None:
    """Print the version."""
    if as_json:
        from appliance.cli import output

        output.data({"version": current_version(), "python": platform.python_version(), "machine": platform.machine()})
    else:
        sys.stdout.write(f"gatehouse {current_version()}\n")


def version_option(
    show: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Handle the option --version."""
    if show:
        version()
        raise typer.Exit
