"""Checks for problems of a start that can be found before anything is installed: the port, the models, the data folder."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path

from steps.choices import Choices
from steps.place import nearest_existing
from steps.refusal import Refusal


def check(choices: Choices) -> None:
    """Raise Refusal for a choice that cannot work. Changes nothing."""
    check_data_dir(choices.data_dir)
    check_address(choices.host, choices.port, choices.data_dir)
    for model in choices.models:
        check_model(model, choices.data_dir)


def check_data_dir(data_dir: Path) -> None:
    """Refuse a data folder that cannot be made or written."""
    base = nearest_existing(data_dir)
    if not base.is_dir():
        raise Refusal(
            f"{base} is a file, so the data folder {data_dir} cannot be there.", "Give another one with --data-dir DIR."
        )
    if not os.access(base, os.W_OK | os.X_OK):
        raise Refusal(
            f"The data folder {data_dir} cannot be written by this user.",
            "Give another one with --data-dir DIR, or change its owner.",
        )


def check_address(host: str, port: int, data_dir: Path) -> None:
    """Refuse an address that cannot be bound now."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise Refusal(
            f"{host!r} is not an address of this machine.", "Give --host 127.0.0.1, or 0.0.0.0 for every address."
        ) from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise _refused_address(host, port, data_dir, error) from error


def _refused_address(host: str, port: int, data_dir: Path, error: OSError) -> Refusal:
    if error.errno == errno.EADDRINUSE:
        running = _running(data_dir)
        if running:
            problem = f"Gatehouse is already running at {running} with the data folder {data_dir}."
            return Refusal(problem, "Use it, or start a second one with another --port and another --data-dir.")
        return Refusal(
            f"Port {port} on {host} is in use by another program.",
            f"Stop it, or choose another port: --port {port + 1 & 65535}",
        )
    if error.errno == errno.EACCES:
        return Refusal(f"This user may not open port {port}.", "Choose a port above 1023: --port 8000")
    return Refusal(f"{host} is not an address of this machine.", "Give --host 127.0.0.1, or 0.0.0.0 for every address.")


def _running(data_dir: Path) -> str | None:
    """Return the address of an appliance that runs on this data folder, from the file it keeps there while it runs."""
    try:
        control = json.loads((data_dir / "control.json").read_text("utf-8"))
        os.kill(int(control["pid"]), 0)
        return str(control["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_model(model: str, data_dir: Path) -> None:
    """Refuse a model that is not a directory in Hugging Face's layout, here or among those added to the data folder."""
    path = Path(model).expanduser()
    if not path.exists() and (data_dir / "models" / model).is_dir():
        path = data_dir / "models" / model
    if not path.exists():
        raise Refusal(
            f"There is no model at {model!r}: neither a folder of that name nor one added to {data_dir / 'models'}.",
            "Download the model and give --model the path of its folder.",
        )
    lacking = missing_parts(path)
    if lacking:
        raise Refusal(
            f"{path} is not a model: it has no {' and no '.join(lacking)}.",
            "Give --model a folder in Hugging Face's layout (config.json, tokenizer.json, *.safetensors).",
        )


def missing_parts(path: Path) -> list[str]:
    """Return which of the parts of a model directory are not at `path`."""
    lacking = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    if not path.is_dir() or not any(path.glob("*.safetensors")):
        lacking.append("*.safetensors")
    return lacking
