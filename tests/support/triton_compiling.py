"""Compiles small kernels together for an absent H200: `python -m tests.support.triton_compiling` prints the results.

Triton's compiler is the real one; the fake card loads any binary and records its launches. Prints one JSON object with an entry
for each of the functions below that is named `when_…`.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from engine.environment import prepare_environment
from kernels.triton.launching import compiled_together as compiled_together_module
from kernels.triton.launching.compiled_together import compiled_together
from kernels.variants import CompilationFailed, Variants
from tests.support.fake_gpu_driver import FakeGpuDriver

SIZES = (16, 32, 64)
BARRIER_S = 60
PARSES = 100


@triton.jit  # type: ignore[untyped-decorator]
def fill_kernel(out: tl.tensor, BLOCK: tl.constexpr) -> None:
    tl.store(out + tl.arange(0, BLOCK), BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def wrong_kernel(out: tl.tensor, BLOCK: tl.constexpr) -> None:
    tl.store(out + tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK))


class Card(FakeGpuDriver):
    """A fake driver that records launches."""

    def __init__(self) -> None:
        self.utils = self
        self.fault = ""
        self.num_loaded = 0
        self.launched: list[str] = []

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448}

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        if self.fault:
            raise RuntimeError(self.fault)
        self.num_loaded += 1
        return 0, 0, 8, 0, 1024

    def unload_module(self, module: Any) -> None:
        """Nothing was loaded."""

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *_: self.launched.append(metadata.name)


CARD = Card()
REPORTS: list[Variants] = []


def launch(kernel: Any, sizes: tuple[int, ...] = SIZES) -> None:
    out = torch.empty(64, dtype=torch.int32)
    for size in sizes:
        kernel[(1,)](out, BLOCK=size)


def compile_failure(kernel: Any) -> str:
    try:
        with compiled_together(REPORTS.append):
            launch(kernel)
    except CompilationFailed as error:
        return str(error)
    return "nothing failed"


def when_compiled_together() -> dict[str, Any]:
    with compiled_together(REPORTS.append):
        launch(fill_kernel)
        launch(fill_kernel)
        launched = len(CARD.launched)
    return {"reports": list(REPORTS), "launched": launched, "loaded": CARD.num_loaded}


def when_launched_afterwards() -> dict[str, Any]:
    launch(fill_kernel)
    return {"launched": list(CARD.launched), "loaded": CARD.num_loaded}


def when_found_on_disk() -> dict[str, Any]:
    fill_kernel.device_caches.clear()
    with compiled_together(REPORTS.append):
        launch(fill_kernel)
    return {"last": REPORTS[-1]}


def when_requested_again_during_compilation() -> dict[str, Any]:
    """A model's second layer requests kernels that are being compiled for the first."""
    fill_kernel.device_caches.clear()
    describe, described = fill_kernel._pack_args, []

    def describe_once(*arguments: Any) -> Any:
        described.append(arguments)
        return describe(*arguments)

    fill_kernel._pack_args = describe_once
    with compiled_together(REPORTS.append):
        for _ in range(3):
            launch(fill_kernel)
    fill_kernel._pack_args = describe
    CARD.launched.clear()
    launch(fill_kernel)
    return {"described": len(described), "last": REPORTS[-1], "launched": list(CARD.launched)}


def when_a_kernel_does_not_compile() -> dict[str, Any]:
    return {"error": compile_failure(wrong_kernel), "again": compile_failure(wrong_kernel)}


def when_a_binary_cannot_be_loaded() -> dict[str, Any]:
    fill_kernel.device_caches.clear()
    CARD.fault = "no memory"
    try:
        return {"error": compile_failure(fill_kernel)}
    finally:
        CARD.fault = ""


def when_a_compilation_hangs() -> dict[str, Any]:
    """A compilation that hangs does not keep the process from exiting: its thread is abandoned."""
    fill_kernel.device_caches.clear()
    launch(fill_kernel, SIZES[2:])  # which sets `compile`
    compile_function = fill_kernel.compile

    def hang(*_: Any, **__: Any) -> Any:
        threading.Event().wait()

    fill_kernel.compile = hang
    limit, compiled_together_module.KERNEL_S_MAX = compiled_together_module.KERNEL_S_MAX, 1.0
    try:
        error = compile_failure(fill_kernel)
    finally:
        fill_kernel.compile, compiled_together_module.KERNEL_S_MAX = compile_function, limit
    fill_kernel.device_caches.clear()
    with compiled_together(REPORTS.append):
        launch(fill_kernel, SIZES[:1])
    return {"error": error, "compiled_then": REPORTS[-1][:2]}


def when_another_thread_launches() -> dict[str, Any]:
    CARD.launched.clear()
    fill_kernel.device_caches.clear()
    with compiled_together(REPORTS.append):
        thread = threading.Thread(target=launch, args=(fill_kernel, SIZES[:1]))
        thread.start()
        thread.join()
        launch(fill_kernel, SIZES[1:])
    return {"launched": list(CARD.launched), "last": REPORTS[-1]}


def when_another_thread_launches_a_kernel_being_compiled() -> dict[str, Any]:
    CARD.launched.clear()
    fill_kernel.device_caches.clear()
    with compiled_together(REPORTS.append):
        launch(fill_kernel)
        thread = threading.Thread(target=launch, args=(fill_kernel,))
        thread.start()
        thread.join()
    return {"launched": list(CARD.launched), "last": REPORTS[-1]}


def when_two_compilations_wait_for_each_other() -> dict[str, Any]:
    barrier = threading.Barrier(2, timeout=BARRIER_S)
    fill_kernel.device_caches.clear()
    launch(fill_kernel, SIZES[2:])  # which sets `compile`
    compile_function = fill_kernel.compile

    def compile_beside(*arguments: Any, **options: Any) -> Any:
        barrier.wait()
        return compile_function(*arguments, **options)

    fill_kernel.compile = compile_beside
    with compiled_together(REPORTS.append):
        launch(fill_kernel, SIZES[:2])
    return {"last": REPORTS[-1]}


def when_kernels_are_parsed_concurrently() -> dict[str, Any]:
    """Garbage collection while a tree is built lets other threads run: two concurrent parses would fail within a few rounds."""
    fill_kernel.device_caches.clear()
    launch(fill_kernel, SIZES[2:])
    compile_function = fill_kernel.compile

    def parse_and_compile(*arguments: Any, **options: Any) -> Any:
        for _ in range(PARSES):
            fill_kernel.parse()
        return compile_function(*arguments, **options)

    def let_others_run(*_: Any) -> None:
        time.sleep(0)

    fill_kernel.compile = parse_and_compile
    thresholds = gc.get_threshold()
    gc.set_threshold(5)
    gc.callbacks.append(let_others_run)
    try:
        with compiled_together(REPORTS.append):
            launch(fill_kernel, SIZES[:2])
    finally:
        gc.callbacks.remove(let_others_run)
        gc.set_threshold(*thresholds)
    return {"last": REPORTS[-1]}


def main() -> None:
    prepare_environment()
    driver.set_active(CARD)
    results = {}
    for name, function in list(globals().items()):
        if name.startswith("when_"):
            REPORTS.clear()
            results[name] = function()
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
