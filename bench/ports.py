"""A free port for a server of a bench. Standard library only: `bench.first_start` runs before anything is installed."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port of the loopback interface on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
