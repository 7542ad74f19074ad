"""Checks with the engine's code, in a subprocess, whether a model folder would load. The subprocess keeps torch out of here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from appliance.cli.failure import CommandFailed
from appliance.serving.supervisor import engine_environment

_ROOT = Path(__file__).resolve().parents[2]
_ERROR_CHARS_MAX = 300


def check_model(
    path: Path,
    options: Sequence[str] = (),
    *,
    switched_off: Sequence[str] = (),
    progress: Callable[[float], None] = lambda _: None,
) -> dict[str, Any]:
    """Return facts about a model, or raise CommandFailed with the reason why it would not load.

    `options` are arguments of `engine.verify`; `switched_off` are the engine features switched off in the settings.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.verify", str(path), *options],
        cwd=_ROOT,
        env=engine_environment(switched_off),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    result: dict[str, Any] | None = None
    last = ""
    with process:
        for line in process.stdout:
            message = _message(line)
            if message is None:
                last = line.strip() or last
            elif "fraction" in message:
                progress(float(message["fraction"]))
            else:
                result = message
    if result is None:
        raise CommandFailed(f"the check of {path} failed: {last[-_ERROR_CHARS_MAX:] or process.returncode}", code="not_a_model")
    if not result.pop("ok"):
        code = str(result["code"])
        raise CommandFailed(str(result["error"]), code=code, status=2 if code == "invalid_option" else 1)
    return result


def _message(line: str) -> dict[str, Any] | None:
    """Return the message in a line of the checker's output, None for other output such as warnings and tracebacks."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and ("fraction" in message or "ok" in message) else None
