"""The GPU that an engine started from this process would compute on, asked of CUDA's driver. Imports the standard library only.

An engine takes the first GPU that CUDA shows it. Which one that is depends on CUDA_VISIBLE_DEVICES (indexes, UUIDs, MIG
instances, or none) and CUDA_DEVICE_ORDER; the driver applies both, so that nothing is parsed here. Asking creates no context
and takes no memory of the GPU. It is done in a process of its own, because a call of a driver that hangs cannot be ended in
this one. Source of names and numbers: cuda.h.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from contextlib import suppress
from typing import Any, NamedTuple

LIBRARY = "libcuda.so.1"
NO_GPU = "no NVIDIA GPU"
NO_ANSWER = "the NVIDIA driver does not answer"
ANSWER_S_MAX = 30.0  # the driver initialises each GPU, which takes seconds where nothing keeps it initialised
_EXIT_S_MAX = 1.0

_FUNCTIONS = (
    "cuInit", "cuDeviceGet", "cuDeviceGetName", "cuDeviceTotalMem_v2", "cuDeviceGetAttribute", "cuGetErrorString",
)  # fmt: skip
_NAME_BYTES = 256
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


class VisibleGpu(NamedTuple):
    """`memory_bytes`: what a process sees of its memory, which is less than NVML reports. `capability`: its compute capability,
    major and minor."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]


class _DriverError(Exception):
    """A call of the driver failed with this number, a CUresult."""

    def __init__(self, result: int) -> None:
        super().__init__(result)
        self.result = result


def first_visible_gpu(answer_s_max: float = ANSWER_S_MAX) -> tuple[VisibleGpu | None, str]:
    """Return the GPU and an empty text, or None and why there is none; `NO_ANSWER` and the limit if the driver hangs."""
    command, silent = [sys.executable, "-I", __file__], subprocess.DEVNULL
    try:
        process = subprocess.Popen(command, stdin=silent, stdout=subprocess.PIPE, stderr=silent, text=True)
    except OSError as error:  # no process is left, or an embedded interpreter has no program of its own
        return None, f"the NVIDIA driver cannot be asked: {error.strerror}"
    try:
        answer, _ = process.communicate(timeout=answer_s_max)
    except subprocess.TimeoutExpired:
        _abandon(process)
        return None, f"{NO_ANSWER} within {answer_s_max:g} s"
    if process.returncode:
        return None, f"the NVIDIA driver ended the process that asked it (exit status {process.returncode})"
    gpu, reason = json.loads(answer.splitlines()[-1])
    return gpu and VisibleGpu(gpu[0], gpu[1], tuple(gpu[2])), reason


def _abandon(process: subprocess.Popen[str]) -> None:
    """Kill `process` without waiting for its end: inside the kernel, a call that hangs cannot be interrupted."""
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_EXIT_S_MAX)
    assert process.stdout is not None
    process.stdout.close()


def ask_driver() -> tuple[VisibleGpu | None, str]:
    """Return what `first_visible_gpu` does, asked in this process and for as long as the driver takes."""
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return None, NO_GPU
    missing = next((name for name in _FUNCTIONS if not hasattr(driver, name)), None)
    if missing is not None:
        return None, f"{LIBRARY} is not NVIDIA's driver: it lacks {missing}"
    try:
        return _first(driver), ""
    except _DriverError as error:
        return None, _reason(driver, error.result)


def _first(driver: Any) -> VisibleGpu:
    device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(_NAME_BYTES)
    _check(driver.cuInit(ctypes.c_uint(0)))
    _check(driver.cuDeviceGet(ctypes.byref(device), ctypes.c_int(0)))
    _check(driver.cuDeviceGetName(name, ctypes.c_int(_NAME_BYTES), device))
    _check(driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device))
    capability = _attribute(driver, _CAPABILITY_MAJOR, device), _attribute(driver, _CAPABILITY_MINOR, device)
    return VisibleGpu(name.value.decode(errors="replace"), memory.value, capability)


def _attribute(driver: Any, attribute: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    _check(driver.cuDeviceGetAttribute(ctypes.byref(value), ctypes.c_int(attribute), device))
    return value.value


def _check(result: int) -> None:
    if result:
        raise _DriverError(result)


def _reason(driver: Any, result: int) -> str:
    if result == _NO_DEVICE:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return NO_GPU if visible is None else f"CUDA_VISIBLE_DEVICES={visible!r} leaves no GPU"
    text = ctypes.c_char_p()
    driver.cuGetErrorString(ctypes.c_int(result), ctypes.byref(text))
    return f"CUDA finds no usable GPU: {(text.value or b'unknown error').decode(errors='replace')} ({result})"


if __name__ == "__main__":
    sys.stdout.write(json.dumps(ask_driver()))
