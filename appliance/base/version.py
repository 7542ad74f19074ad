"""The version of this installation, from pyproject.toml of a clone, else from the installed package."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

_PROJECT_FILE = Path(__file__).resolve().parents[2] / "pyproject.toml"


@cache
def current_version() -> str:
    """Return the version, such as `2026.11.0`."""
    if not _PROJECT_FILE.is_file():
        from importlib import metadata

        return metadata.version("gatehouse")
    version = tomllib.loads(_PROJECT_FILE.read_text("utf-8"))["project"]["version"]
    assert isinstance(version, str)
    return version
