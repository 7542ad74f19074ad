"""The GPU that engines would use is the first one that CUDA's driver shows."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_size_t, c_uint
from pathlib import Path
from typing import Any

import pytest

from engine import visible_gpu
from engine.visible_gpu import VisibleGpu, ask_driver, first_visible_gpu

SUCCESS, NO_DEVICE, SYSTEM_NOT_READY = 0, 100, 802
SMALL, LARGE = VisibleGpu("Small", 24 << 30, (8, 9)), VisibleGpu("Large", 141 << 30, (9, 0))


class FakeCudaDriver:
    """The functions of libcuda with the types of cuda.h. `gpus` are those that it shows, in its order; `init` is what `cuInit`
    returns."""

    def __init__(self, *gpus: VisibleGpu, init: int = SUCCESS) -> None:
        self._gpus, self._init, self._is_open = gpus, init, False
        self.cuInit = CFUNCTYPE(c_int, c_uint)(self._initialise)
        self.cuDeviceGet = CFUNCTYPE(c_int, POINTER(c_int), c_int)(self._device)
        self.cuDeviceGetName = CFUNCTYPE(c_int, POINTER(ctypes.c_char), c_int, c_int)(self._name)
        self.cuDeviceTotalMem_v2 = CFUNCTYPE(c_int, POINTER(c_size_t), c_int)(self._memory)
        self.cuDeviceGetAttribute = CFUNCTYPE(c_int, POINTER(c_int), c_int, c_int)(self._attribute)
        self.cuGetErrorString = CFUNCTYPE(c_int, c_int, POINTER(c_char_p))(self._error)

    def _initialise(self, flags: int) -> int:
        self._is_open = flags == 0
        return self._init

    def _device(self, device: Any, ordinal: int) -> int:
        assert self._is_open
        device[0] = 7 + ordinal  # a handle, not the ordinal
        return SUCCESS

    def _name(self, name: Any, size: int, device: int) -> int:
        text = self._gpus[device - 7].name.encode() + b"\0"
        assert len(text) <= size
        for position, byte in enumerate(text):
            name[position] = byte
        return SUCCESS

    def _memory(self, memory: Any, device: int) -> int:
        memory[0] = self._gpus[device - 7].memory_bytes
        return SUCCESS

    def _attribute(self, value: Any, attribute: int, device: int) -> int:
        value[0] = self._gpus[device - 7].capability[{75: 0, 76: 1}[attribute]]
        return SUCCESS

    def _error(self, result: int, text: Any) -> int:
        text[0] = {SYSTEM_NOT_READY: b"system not yet initialized"}[result]
        return SUCCESS


@pytest.fixture
def use_driver(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeCudaDriver], None]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda driver: monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)


def test_it_is_the_first_one_and_not_the_largest(use_driver: Callable[[FakeCudaDriver], None]) -> None:
    use_driver(FakeCudaDriver(SMALL, LARGE))
    assert ask_driver() == (SMALL, "")
    use_driver(FakeCudaDriver(LARGE, SMALL))
    assert ask_driver() == (LARGE, "")


def test_without_the_library_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible_gpu, "LIBRARY", "libcuda-that-is-not-installed.so.1")
    assert ask_driver() == (None, "no NVIDIA GPU")


def test_without_a_device_there_is_none(use_driver: Callable[[FakeCudaDriver], None]) -> None:
    use_driver(FakeCudaDriver(init=NO_DEVICE))
    assert ask_driver() == (None, "no NVIDIA GPU")


@pytest.mark.parametrize("visible", ["", "-1", "9"])
def test_a_variable_that_hides_all_is_named(
    visible: str, use_driver: Callable[[FakeCudaDriver], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    use_driver(FakeCudaDriver(init=NO_DEVICE))
    assert ask_driver() == (None, f"CUDA_VISIBLE_DEVICES={visible!r} leaves no GPU")


def test_another_error_is_given_in_the_words_of_the_driver(use_driver: Callable[[FakeCudaDriver], None]) -> None:
    use_driver(FakeCudaDriver(init=SYSTEM_NOT_READY))
    assert ask_driver() == (None, "CUDA finds no usable GPU: system not yet initialized (802)")


def test_a_library_without_the_functions_of_the_driver_is_named(use_driver: Callable[[FakeCudaDriver], None]) -> None:
    driver = FakeCudaDriver(SMALL)
    del driver.cuDeviceTotalMem_v2
    use_driver(driver)
    assert ask_driver() == (None, "libcuda.so.1 is not NVIDIA's driver: it lacks cuDeviceTotalMem_v2")


DRIVER_IN_C = """
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int cuInit(unsigned flags) { %s; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "Small", size); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 24UL << 30; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 8 : 9; return 0; }
int cuGetErrorString(int result, const char **text) { return 0; }
"""


@pytest.fixture
def install_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that lets new processes find a driver whose `cuInit` runs this statement of C."""

    def install(init: str) -> None:
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / visible_gpu.LIBRARY)]
        subprocess.run(command, input=DRIVER_IN_C % init, text=True, check=True)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))

    return install


def test_a_driver_that_answers_is_asked_in_another_process(install_driver: Callable[[str], None]) -> None:
    install_driver("")
    assert first_visible_gpu() == (SMALL, "")


def test_a_driver_that_hangs_is_given_up_after_the_limit(install_driver: Callable[[str], None]) -> None:
    install_driver("for (;;) pause()")
    assert first_visible_gpu(0.5) == (None, "the NVIDIA driver does not answer within 0.5 s")


def test_a_driver_that_crashes_is_named(install_driver: Callable[[str], None]) -> None:
    install_driver("abort()")
    assert first_visible_gpu() == (None, "the NVIDIA driver ended the process that asked it (exit status -6)")
