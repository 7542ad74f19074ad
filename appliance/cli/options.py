"""The options that several commands share, and the settings that they make."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from appliance.base.settings import Settings

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text, errors included.")]
DataDir = Annotated[
    str | None, typer.Option("--data-dir", metavar="DIR", help="The appliance's data folder (default: that of the platform).")
]
DatabaseUrl = Annotated[
    str | None,
    typer.Option("--database", metavar="URL", help="sqlite:///PATH or postgresql://… (default: SQLite in the data folder)."),
]


def settings_from(data_dir: str | None, database: str | None, **others: object) -> Settings:
    """Return the settings that a command runs with. Raises SettingsError."""
    from appliance.base.settings import load_settings

    return load_settings(options={"data_dir": data_dir, "database_url": database, **others}, environ=os.environ)
