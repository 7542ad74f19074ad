"""Paths of the clone, its `.venv`, the lock files and the default data folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
VENV = REPO / ".venv"
REQUIREMENTS = REPO / "installer" / "requirements"


def venv_python(venv: Path = VENV) -> Path:
    """Return the interpreter inside `venv`."""
    return venv / "bin" / "python"


def default_data_dir() -> Path:
    """Return the default data folder of the platform, the same as in the appliance's settings."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "gatehouse"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "gatehouse"


def nearest_existing(path: Path) -> Path:
    """Return `path` if it exists, else its nearest existing parent."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
