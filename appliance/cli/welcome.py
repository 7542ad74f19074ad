"""The text when the appliance is up: where the console is, how to sign in, and one command that works as printed."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The facts of a start. Login and secrets are None on every start but the first: they cannot be shown again. A password or
    token that the operator has set is None on the first start too.

    `command` is how to type `gatehouse` here; `data_dir` is None if it is the platform's default, which needs no option.
    """

    url: str
    model: str
    command: str = "gatehouse"
    data_dir: Path | None = None
    admin_email: str | None = None
    admin_password: str | None = None
    admin_token: str | None = None
    api_key: str | None = None


def login(welcome: Welcome) -> str:
    """Return the lines of the first start, printed before the models load, since loading may fail."""
    lines = ["", f"Your login, shown once: keep it now.  Console:  {welcome.url}/"]
    lines += [f"  Sign in as    {welcome.admin_email}", f"  Password      {welcome.admin_password or 'as you have set it'}"]
    if welcome.admin_token is not None:
        lines += [f"  Admin token   {welcome.admin_token}   (bearer token of /admin/v1)"]
    return "\n".join([*lines, f"  API key       {welcome.api_key}   (of the tenant demo)", ""])


def ready(welcome: Welcome) -> str:
    """Return the lines to print once a model answers. At a first start the curl line contains the key."""
    lines = ["", f"Gatehouse is ready.  Console:  {welcome.url}/"]
    if welcome.api_key is None:
        lines += [
            f"  The login was shown at the first start; a new password: {command(welcome, 'admin reset-password E-MAIL')}"
        ]
    lines += [
        "",
        "Try it:" if welcome.api_key else f"Try it with a key (a new one: {command(welcome, 'keys create demo')}):",
        "",
    ]
    lines += [curl(welcome.url, welcome.model, welcome.api_key or "YOUR_KEY"), "", "Ctrl-C drains and stops.", ""]
    return "\n".join(lines)


def command(welcome: Welcome, rest: str) -> str:
    """Return a shell command that runs `gatehouse` on the data of this appliance."""
    option = "" if welcome.data_dir is None else f" --data-dir {shlex.quote(str(welcome.data_dir))}"
    return f"{welcome.command} {rest}{option}"


def program() -> str:
    """Return how to type `gatehouse` here: its name if the shell finds it, else its path next to this Python."""
    beside = Path(sys.executable).with_name("gatehouse")
    if shutil.which("gatehouse") or not beside.exists():
        return "gatehouse"
    return shlex.quote(str(beside))


def curl(url: str, model: str, key: str) -> str:
    """Return a one-line shell command that asks `model` a question and streams the answer."""
    body = {
        "model": model,
        "stream": True,
        "max_tokens": 64,
        "messages": [{"role": "user", "content": "What does os.path.join do?"}],
    }
    parts = [
        "curl",
        "-N",
        f"{url}/v1/chat/completions",
        "-H",
        f"Authorization: Bearer {key}",
        "-H",
        "Content-Type: application/json",
    ]
    return " ".join(shlex.quote(part) for part in [*parts, "-d", json.dumps(body, ensure_ascii=False)])
