"""Names of devices and number formats, resolved to torch's, with the errors an operator needs."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from engine.errors import EngineConfigError
from engine.formats import computed_dtype
from engine.visible_gpu import NO_ANSWER, first_visible_gpu

log = logging.getLogger("gatehouse.engine")

DRIVER = Path("/proc/driver/nvidia/version")
"""Exists on Linux if NVIDIA's driver is loaded."""

DRIVER_ANSWER_S_MAX = 120.0
"""For the first call, which initialises all GPUs of the machine where nothing keeps them initialised."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """`auto` is the first GPU if torch sees one, else the CPU; `cuda` without a usable GPU is an error. For `cpu` the driver is
    not asked, so that models run on the CPU of a machine whose driver hangs; otherwise that is an error, too."""
    if name == "cpu":
        return torch.device("cpu")
    _check_driver_answers(name)
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        advice = "use cpu, or auto, which stays on the GPU once it has served there"
        raise EngineConfigError("device", f"is cuda, but torch finds no usable NVIDIA GPU here; {advice}. {_no_gpu()}")
    device = torch.device("cuda", 0) if available else torch.device("cpu")
    note = unused_gpu(name, device)
    if note is not None:
        log.warning("serving on the CPU although an NVIDIA driver is installed: %s", note)
    return device


def _check_driver_answers(name: str) -> None:
    """Raise `EngineConfigError` if NVIDIA's driver hangs. Another process asks it: torch's call could be neither ended nor told
    apart from a slow start."""
    if not DRIVER.exists() or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    _, reason = first_visible_gpu(DRIVER_ANSWER_S_MAX)
    if reason.startswith(NO_ANSWER):
        advice = "look at the kernel's log (dmesg) and restart this machine, or use cpu"
        raise EngineConfigError("device", f"is {name}, but {reason}: {advice}")


def unused_gpu(name: str, device: torch.device) -> str | None:
    """Why `auto` is the CPU although NVIDIA's driver is loaded, in torch's words; None if it is not."""
    if name != "auto" or device.type == "cuda" or not DRIVER.exists():
        return None
    return f"torch finds no usable GPU. {_no_gpu()}"


def _no_gpu() -> str:
    """Why torch finds none, in its own words: no driver, one too old for its CUDA, or a build for CPUs."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return f"torch {torch.__version__}: {' '.join(str(error).split())}"
    return f"torch {torch.__version__} sees {torch.cuda.device_count()} of them; CUDA_VISIBLE_DEVICES may hide others"


def is_lost(device: torch.device) -> bool:
    """Whether a GPU computes nothing for this process any more. After an illegal access or the like CUDA refuses every call, a
    wait for the device too, until the process ends. After any other failure, as of an allocation, the wait succeeds."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.current_stream(device).synchronize()
    except RuntimeError:
        return True
    return False


def resolve_dtype(name: str, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """The format that is computed in, for the option `dtype` of this name."""
    return DTYPES[computed_dtype(name, checkpoint_dtype, device.type)]


def resolve_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The format of keys and values in the cache."""
    return dtype if name == "auto" else torch.float8_e4m3fn


def format_name(dtype: torch.dtype) -> str:
    """As options call it: bfloat16, fp8_e4m3."""
    return "fp8_e4m3" if dtype is torch.float8_e4m3fn else str(dtype).removeprefix("torch.")


def device_capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a GPU, None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads != 1 else ''}"
