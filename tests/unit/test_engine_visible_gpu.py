"""The GPU that engines would use is the first one that CUDA's driver shows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_size_t, c_uint
from typing import Any

import pytest

from engine import visible_gpu
from engine.visible_gpu import VisibleGpu, first_visible_gpu

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
    assert first_visible_gpu() == (SMALL, "")
    use_driver(FakeCudaDriver(LARGE, SMALL))
    assert first_visible_gpu() == (LARGE, "")


def test_without_the_library_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible_gpu, "LIBRARY", "libcuda-that-is-not-installed.so.1")
    assert first_visible_gpu() == (None, "no NVIDIA GPU")


def test_without_a_device_there_is_none(use_driver: Callable[[FakeCudaDriver], None]) -> None:
    use_driver(FakeCudaDriver(init=NO_DEVICE))
    assert first_visible_gpu() == (None, "no NVIDIA GPU")


@pytest.mark.parametrize("visible", ["", "-1", "9"])
def test_a_variable_that_hides_all_is_named(
    visible: str, use_driver: Callable[[FakeCudaDriver], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    use_driver(FakeCudaDriver(init=NO_DEVICE))
    assert first_visible_gpu() == (None, f"CUDA_VISIBLE_DEVICES={visible!r} leaves no GPU")


def test_another_error_is_given_in_the_words_of_the_driver(use_driver: Callable[[FakeCudaDriver], None]) -> None:
    use_driver(FakeCudaDriver(init=SYSTEM_NOT_READY))
    assert first_visible_gpu() == (None, "CUDA finds no usable GPU: system not yet initialized (802)")


def test_a_library_without_the_functions_of_the_driver_is_named(use_driver: Callable[[FakeCudaDriver], None]) -> None:
    driver = FakeCudaDriver(SMALL)
    del driver.cuDeviceTotalMem_v2
    use_driver(driver)
    assert first_visible_gpu() == (None, "libcuda.so.1 is not NVIDIA's driver: it lacks cuDeviceTotalMem_v2")
