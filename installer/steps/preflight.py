"""Checks, before anything is installed, what would prevent a start: port, models, data folder."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path

from steps.choices import Choices
from steps.errors import InstallerError
from steps.paths import nearest_existing


def check(choices: Choices) -> None:
    """Raise InstallerError for a setting that cannot work. Changes nothing."""
    check_data_dir(choices.data_dir)
    check_address(choices.host, choices.port, choices.data_dir)
    for model in choices.models:
        check_model(model, choices.data_dir)


def check_data_dir(data_dir: Path) -> None:
    """Raise InstallerError if the data folder cannot be created or written."""
    base = nearest_existing(data_dir)
    if not base.is_dir():
        raise InstallerError(
            f"{base} is a file, so the data folder {data_dir} cannot be created.", "Give another folder with --data-dir DIR."
        )
    if not os.access(base, os.W_OK | os.X_OK):
        raise InstallerError(
            f"The data folder {data_dir} is not writable by this user.",
            "Give another folder with --data-dir DIR, or change its owner.",
        )


def check_address(host: str, port: int, data_dir: Path) -> None:
    """Raise InstallerError if the address cannot be bound now."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise InstallerError(
            f"{host!r} is not an address of this machine.", "Give --host 127.0.0.1, or 0.0.0.0 for every address."
        ) from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise _bind_error(host, port, data_dir, error) from error


def _bind_error(host: str, port: int, data_dir: Path, error: OSError) -> InstallerError:
    if error.errno == errno.EADDRINUSE:
        running = _running(data_dir)
        if running:
            problem = f"Gatehouse is already running at {running} with the data folder {data_dir}."
            return InstallerError(problem, "Use it, or start another one with a different --port and --data-dir.")
        return InstallerError(
            f"Port {port} on {host} is in use by another program.",
            f"Stop it, or choose another port: --port {port + 1 & 65535}",
        )
    if error.errno == errno.EACCES:
        return InstallerError(f"This user may not open port {port}.", "Choose a port above 1023: --port 8000")
    return InstallerError(f"{host} is not an address of this machine.", "Give --host 127.0.0.1, or 0.0.0.0 for every address.")


def _running(data_dir: Path) -> str | None:
    """Return the URL of the appliance that is running with this data folder, from its control file, else None."""
    try:
        control = json.loads((data_dir / "control.json").read_text("utf-8"))
        os.kill(int(control["pid"]), 0)
        return str(control["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_model(model: str, data_dir: Path) -> None:
    """Raise InstallerError unless `model` is a folder in Hugging Face format, here or among those added to the data folder."""
    path = Path(model).expanduser()
    if not path.exists() and (data_dir / "models" / model).is_dir():
        path = data_dir / "models" / model
    if not path.exists():
        raise InstallerError(
            f"There is no model {model!r}: it is neither a folder nor a model added to {data_dir / 'models'}.",
            "Download the model and give --model the path of its folder.",
        )
    missing = missing_files(path)
    if missing:
        raise InstallerError(
            f"{path} is not a model: it has no {' and no '.join(missing)}.",
            "Give --model a folder in Hugging Face format (config.json, tokenizer.json, *.safetensors).",
        )


def missing_files(path: Path) -> list[str]:
    """Return the files of a model that are missing in the folder `path`."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    if not path.is_dir() or not any(path.glob("*.safetensors")):
        missing.append("*.safetensors")
    return missing
