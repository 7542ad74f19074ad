"""The machine's other activity during a measurement, and the rule by which a round is discarded. Linux."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

CORES_MAX = 0.06
"""A quiet system with its timers uses 0.01 to 0.03 cores."""
TICKS_MAX = 3
"""Ticks of CPU time that are never a disturbance, however short the run: the counters are not finer."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A reading of the machine's counters. `busy_s`: time of processes and interrupts on all cores, without waits and steal."""

    at_s: float
    busy_s: float
    steal_s: float


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Cores used by other processes, and cores taken by the host, averaged over one run."""

    others_cores: float
    steal_cores: float
    wall_s: float

    def reason(self, cores_max: float) -> str:
        """Why a round with this run is discarded (others and the host together took more than `cores_max`), or empty."""
        if self.others_cores + self.steal_cores <= max(cores_max, TICKS_MAX * tick_s() / self.wall_s):
            return ""
        return f"others used {self.others_cores:.2f} cores, the host took {self.steal_cores:.2f}"


def tick_s() -> float:
    return 1 / os.sysconf("SC_CLK_TCK")


def read_machine(text: str | None = None) -> Reading:
    """Counters now, from /proc/stat or from its first line as given."""
    line = (text or Path("/proc/stat").read_text("ascii")).split("\n", 1)[0]
    user, nice, system, _, _, irq, softirq, steal = map(int, line.split()[1:9])
    return Reading(time.perf_counter(), (user + nice + system + irq + softirq) * tick_s(), steal * tick_s())


def disturbance_between(before: Reading, after: Reading, known_cpu_s: float) -> Disturbance:
    """The machine's CPU time between two readings, less `known_cpu_s` of the measured process and of the bench."""
    wall_s = max(after.at_s - before.at_s, 1e-9)
    others_s = max(after.busy_s - before.busy_s - known_cpu_s, 0.0)
    return Disturbance(others_s / wall_s, (after.steal_s - before.steal_s) / wall_s, wall_s)
