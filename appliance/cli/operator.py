"""The operator of a command, for the audit log: the user of this machine who runs it."""

from __future__ import annotations

import getpass
import os
from urllib.parse import quote

from appliance.base.acting import OPERATOR_HEADER, Actor


def operator_headers() -> dict[str, str]:
    """Return the headers that name the operator to the appliance, percent-encoded."""
    return {OPERATOR_HEADER: quote(operator().name)}


def operator() -> Actor:
    """Return the actor for changes by this command."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        name = f"user {os.getuid()}"
    return Actor(kind="cli", name=name)
