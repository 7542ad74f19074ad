"""The settings needed before anything is installed, from options, environment or gatehouse.toml.

The appliance parses its settings itself, strictly; here they are read only to report a bad port or path within a second.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steps.errors import InstallerError
from steps.paths import default_data_dir

PORT_DEFAULT = 8000
HOST_DEFAULT = "127.0.0.1"
DEVICES = ("auto", "cuda", "cpu")
_DATABASES = re.compile(r"^(sqlite:///.+|postgres(ql)?://.+)$", re.DOTALL)


@dataclass(frozen=True)
class Choices:
    """The effective values of the settings that the installer needs."""

    host: str
    port: int
    data_dir: Path
    models: tuple[str, ...]
    device: str


def choose(options: Mapping[str, Any], environ: Mapping[str, str]) -> Choices:
    """Return the settings: option, else environment, gatehouse.toml, default. Raises InstallerError for invalid values."""
    data_dir = _data_dir(options.get("data_dir") or environ.get("GATEHOUSE_DATA_DIR"))
    stored = _stored(data_dir)

    def value(name: str, default: Any) -> Any:
        given = options.get(name)
        return given if given is not None else environ.get(f"GATEHOUSE_{name.upper()}") or stored.get(name, default)

    _check_database(str(options.get("database") or environ.get("GATEHOUSE_DATABASE_URL") or stored.get("database_url", "")))
    models = _models(options.get("model"), environ.get("GATEHOUSE_MODELS"), stored.get("models"))
    return Choices(
        host=str(value("host", HOST_DEFAULT)),
        port=_port(value("port", PORT_DEFAULT)),
        data_dir=data_dir,
        models=tuple(models),
        device=_device_of_all(_device(str(value("device", "auto"))), models),
    )


def _data_dir(given: str | None) -> Path:
    return Path(os.path.abspath(os.path.expanduser(given))) if given else default_data_dir()


def _stored(data_dir: Path) -> Mapping[str, Any]:
    path = data_dir / "gatehouse.toml"
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise InstallerError(f"Cannot read {path}: {error.strerror}.", "Fix its permissions or move it away.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InstallerError(f"{path} is not valid TOML: {error}.", "Fix it or move it away.") from error


def _port(given: Any) -> int:
    try:
        port = int(given)
    except (TypeError, ValueError):
        port = -1
    if not 0 <= port <= 65535:
        raise InstallerError(f"{given!r} is not a valid port.", "Give --port a number between 1 and 65535.")
    return port


def _models(option: list[str] | None, environment: str | None, stored: Any) -> dict[str, str | None]:
    """Return the models by path or name, each with the device that it sets for itself, or None."""
    named = option or (_listed(environment) if environment else stored)
    found: dict[str, str | None] = {}
    for entry in named if isinstance(named, list) else ():
        table = entry if isinstance(entry, dict) else {"model": entry}
        if isinstance(table.get("model"), str):
            found[table["model"]] = table.get("device")
    return found


def _listed(text: str) -> Any:
    """Parse a JSON list or a comma-separated list. Errors are reported later, by the appliance."""
    if not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _device_of_all(device: str, models: Mapping[str, str | None]) -> str:
    """Return the most demanding device of all models: cuda if one requires it, cpu if all use the CPU, else auto."""
    devices = {own or device for own in models.values()} or {device}
    return next((demanding for demanding in ("cuda", "auto") if demanding in devices), "cpu")


def _device(device: str) -> str:
    if device not in DEVICES:
        raise InstallerError(f"{device!r} is not a valid device.", f"--device must be one of {', '.join(DEVICES)}.")
    return device


def _check_database(url: str) -> None:
    """Check only the form of the URL, and never print it: it may contain a password."""
    if url and not _DATABASES.match(url):
        raise InstallerError(
            "The database URL is not valid.",
            "Give sqlite:///PATH or postgresql://USER:PASSWORD@HOST:PORT/NAME.",
        )
