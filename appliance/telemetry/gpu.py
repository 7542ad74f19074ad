"""GPU readings through NVML, without torch. Without a driver it reports so in one sentence and does nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import Any

import pynvml

NO_GPU = "no NVIDIA GPU"
MILLIWATTS_PER_WATT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One GPU at one moment. `utilization` is the percentage of time busy; values that a GPU does not report are None."""

    index: int
    name: str
    memory_total_bytes: int
    memory_used_bytes: int
    utilization: int | None
    power_w: float | None
    temperature_c: int | None


class GpuProbe:
    """Reads all GPUs of the machine. `error` is the reason why there are no readings, else None."""

    def __init__(self) -> None:
        self.error: str | None = NO_GPU
        self._is_open: bool | None = None  # None: to be initialised by the next reading
        self._in_use = Lock()

    def close(self) -> None:
        """Shut NVML down, unless another thread reads: a driver that does not answer would not answer to this either."""
        was_open, self._is_open = self._is_open, False
        if was_open and self._in_use.acquire(blocking=False):
            try:
                pynvml.nvmlShutdown()
            finally:
                self._in_use.release()

    def read(self) -> list[GpuReading]:
        """Return one reading per GPU. If one GPU fails, return an empty list and set `error`. Initialises NVML if it is not."""
        with self._in_use:
            if self._is_open is None:
                self._is_open = self._initialise()
            if not self._is_open:
                return []
            try:
                readings = [_read(index) for index in range(pynvml.nvmlDeviceGetCount())]
            except pynvml.NVMLError as error:
                self.error = f"GPU cannot be read: {error}"
                return []
        self.error = None if readings else NO_GPU
        return readings

    def _initialise(self) -> bool | None:
        """Return whether NVML can be used; None to try again, because a driver may be repaired. A missing library or driver is
        no failure: it means a machine without a GPU."""
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.error = _error_text(error)
            return False if self.error == NO_GPU else None
        return True


def _error_text(error: Any) -> str:
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
    """Return the result of an NVML query, or None if the GPU does not support it."""
    try:
        return query(*arguments)
    except pynvml.NVMLError_NotSupported:
        return None
