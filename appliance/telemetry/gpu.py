"""GPU readings through NVML. Knows no torch; on a machine without a driver it says so in one sentence and costs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pynvml

NO_GPU = "no NVIDIA GPU"
MILLIWATTS_PER_WATT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One GPU at one moment. `utilization` is percent of time busy; figures a card does not report are None."""

    index: int
    name: str
    memory_total_bytes: int
    memory_used_bytes: int
    utilization: int | None
    power_w: float | None
    temperature_c: int | None


class GpuProbe:
    """Reads every GPU of the machine. `error` is None, or why there is nothing to read."""

    def __init__(self) -> None:
        self.error: str | None = NO_GPU
        self._open = False

    def open(self) -> None:
        """Start NVML. A missing library or driver is not a failure: it is a machine without a GPU."""
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.error = _sentence(error)
            return
        self._open = True
        self.error = None

    def close(self) -> None:
        """Stop NVML."""
        if self._open:
            pynvml.nvmlShutdown()
            self._open = False

    def read(self) -> list[GpuReading]:
        """Return one reading per GPU. A card that fails leaves an empty list and the reason in `error`."""
        if not self._open:
            return []
        try:
            readings = [_read(index) for index in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            self.error = f"GPU cannot be read: {error}"
            return []
        self.error = None if readings else NO_GPU
        return readings


def _sentence(error: Any) -> str:
    absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_GPU_NOT_FOUND)
    return NO_GPU if error.value in absent else f"GPU cannot be read: {error}"


def _read(index: int) -> GpuReading:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    power_mw = _optional(pynvml.nvmlDeviceGetPowerUsage, handle)
    utilization = _optional(pynvml.nvmlDeviceGetUtilizationRates, handle)
    return GpuReading(
        index=index,
        name=str(pynvml.nvmlDeviceGetName(handle)),
        memory_total_bytes=int(memory.total),
        memory_used_bytes=int(memory.used),
        utilization=None if utilization is None else int(utilization.gpu),
        power_w=None if power_mw is None else power_mw / MILLIWATTS_PER_WATT,
        temperature_c=_optional(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
    )


def _optional(query: Any, *arguments: Any) -> Any:
    """Return the answer of an NVML query, or None where the card does not know the quantity."""
    try:
        return query(*arguments)
    except pynvml.NVMLError_NotSupported:
        return None
