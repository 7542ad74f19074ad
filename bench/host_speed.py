"""How fast the host runs all cores of this machine at once, to detect disturbed measurements.

A virtual machine on a shared host may run at half its speed for minutes without its counters showing it (no steal). So before
and after each part of a measurement, a bench measures how much work all cores do together in PROBE_S, and discards a part if
that was less than UNDISTURBED of the most ever seen. The measured figures themselves play no role in this.

    python -m bench.host_speed           runs one of the working processes
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

PROBE_S = 0.15
UNDISTURBED = 0.75
_WORK = bytes(100_000)


class HostSpeed:
    """One process per core, each idle between measurements. `fastest` is the highest speed seen."""

    def __init__(self) -> None:
        self.fastest = 0.0
        command = [sys.executable, "-m", "bench.host_speed"]
        self._workers = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
            for _ in range(os.cpu_count() or 1)
        ]

    def measure(self) -> float:
        """Return the slowest core's pieces of work per second while all cores work."""
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(b"\n")
        speed = min(float(worker.stdout.readline()) for worker in self._workers if worker.stdout is not None)
        self.fastest = max(self.fastest, speed)
        return speed

    def undisturbed(self, parts: Sequence[tuple[float, T]]) -> list[T]:
        """Return the parts during which the host ran at full speed; each is given with the lower of the speeds around it."""
        return [part for speed, part in parts if speed >= UNDISTURBED * self.fastest]

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.communicate()


@contextmanager
def host_speed() -> Iterator[HostSpeed]:
    """Yield a HostSpeed, and end its processes afterwards."""
    speed = HostSpeed()
    try:
        yield speed
    finally:
        speed.close()


def _work() -> float:
    began_s = time.perf_counter()
    pieces = 0
    while time.perf_counter() - began_s < PROBE_S:
        zlib.crc32(_WORK)
        pieces += 1
    return pieces / PROBE_S


def main() -> None:
    """Do a probe's work for every input line."""
    for _ in sys.stdin.buffer:
        sys.stdout.write(f"{_work():.1f}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
