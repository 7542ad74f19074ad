"""Who acts when a command works on the database itself: the user of this machine, as the audit log shall name them."""

from __future__ import annotations

import getpass
import os

from appliance.base.acting import Actor


def operator() -> Actor:
    """Return the author of what a command changes."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user that has no name
        name = f"user {os.getuid()}"
    return Actor(kind="cli", name=name)
