"""The welcome text of a started appliance: console URL, login, and a curl command that works as printed."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The values in the welcome text. Login and secrets are set only on the first start, because they cannot be shown again;
    a password or token chosen by the operator is never shown.

    `command` is how to call `gatehouse` here; `data_dir` is None for the platform's default, which needs no option.
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
    """Return the login of the first start. It is printed before models load, because loading may fail."""
    lines = ["", f"Your login. Save it now: it is not shown again.  Console:  {welcome.url}/"]
    lines += [f"  Sign in as    {welcome.admin_email}", f"  Password      {welcome.admin_password or 'as set by you'}"]
    if welcome.admin_token is not None:
        lines += [f"  Admin token   {welcome.admin_token}   (bearer token for /admin/v1)"]
    return "\n".join([*lines, f"  API key       {welcome.api_key}   (of the tenant demo)", ""])


def ready(welcome: Welcome) -> str:
    """Return the lines to print once a model is ready. On the first start the curl command contains the API key."""
    lines = ["", f"Gatehouse is ready.  Console:  {welcome.url}/"]
    if welcome.api_key is None:
        lines += [
            f"  The login was shown on the first start. To reset a password: {command(welcome, 'admin reset-password E-MAIL')}"
        ]
    lines += [
        "",
        "Try it:" if welcome.api_key else f"Try it with your API key (create one: {command(welcome, 'keys create demo')}):",
        "",
    ]
    lines += [curl(welcome.url, welcome.model, welcome.api_key or "YOUR_KEY"), "", "Ctrl-C drains and stops.", ""]
    return "\n".join(lines)


def command(welcome: Welcome, rest: str) -> str:
    """Return a shell command that runs `gatehouse` on this appliance's data."""
    option = "" if welcome.data_dir is None else f" --data-dir {shlex.quote(str(welcome.data_dir))}"
    return f"{welcome.command} {rest}{option}"


def program() -> str:
    """Return how to call `gatehouse` here: by name if the shell finds it, else by its path next to this Python."""
    beside = Path(sys.executable).with_name("gatehouse")
    if shutil.which("gatehouse") or not beside.exists():
        return "gatehouse"
    return shlex.quote(str(beside))


def curl(url: str, model: str, key: str) -> str:
    """Return a one-line curl command that asks `model` a question and streams the answer."""
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
