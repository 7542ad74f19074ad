"""Runs the engine for tests in a process of its own, on an inherited socket."""

from __future__ import annotations

import socket

import torch

from engine.main import main
from kernels.ops import operations

operations(torch.device("cpu"), torch.float32)  # loading them takes two seconds, in the fork server only once


def run(connection: socket.socket, options: str) -> int:
    """Run `engine.main` with these options (JSON) and return its exit status."""
    return main(["--fd", str(connection.detach()), "--options", options])
