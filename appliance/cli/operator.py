"""Who acts when a command changes something: the user of this machine, as named in the audit log."""

from __future__ import annotations

import getpass
import os
from urllib.parse import quote

from appliance.base.acting import OPERATOR_HEADER, Actor


def operator_headers() -> dict[str, str]:
    """Return the headers that tell the appliance who runs the command, encoded in ASCII."""
    return {OPERATOR_HEADER: quote(operator().name)}


def operator() -> Actor:
    """Return the author of what a command changes."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        name = f"user {os.getuid()}"
    return Actor(kind="cli", name=name)
