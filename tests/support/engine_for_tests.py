"""The engine for tests in a process of its own, over a socket that it is given."""

from __future__ import annotations

import socket

from engine.main import main


def run(connection: socket.socket, options: str) -> int:
    """Serve as `engine.main` does with these options, JSON, and return its status."""
    return main(["--fd", str(connection.detach()), "--options", options])
