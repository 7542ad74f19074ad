"""Host readings through psutil: CPU, memory, and disk of the data folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReading:
    """The machine at one moment. `cpu_percent` is the load of all cores (0 to 100) since the previous reading."""

    cpu_percent: float
    cpu_count: int
    memory_total_bytes: int
    memory_used_bytes: int
    disk_total_bytes: int
    disk_free_bytes: int


class HostProbe:
    """Reads the host. The CPU load of the first reading covers the time since the probe was created."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = str(data_dir)
        psutil.cpu_percent(interval=None)

    def read(self) -> HostReading:
        """Return the current reading. Takes well under a millisecond and does not block."""
        memory = psutil.virtual_memory()
        disk = psutil.disk_usage(self._data_dir)
        return HostReading(
            cpu_percent=float(psutil.cpu_percent(interval=None)),
            cpu_count=psutil.cpu_count() or 1,
            memory_total_bytes=int(memory.total),
            memory_used_bytes=int(memory.total - memory.available),
            disk_total_bytes=int(disk.total),
            disk_free_bytes=int(disk.free),
        )
