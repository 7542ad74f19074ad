"""An emulated card for Triton: it compiles for an H200, and launches are executed on CPU tensors.

Triton itself binds arguments, specialises and compiles; only its last step, the assembler, is skipped, and PTX is stored as the
binary. Everything before the driver is as on a card.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from tests.support.fake_gpu_driver import FakeGpuDriver
from tests.support.ptx import arithmetic, bits, conversions, copies, matrices, moves, warpgroups, warps
from tests.support.ptx.block import LOCKSTEP, REVERSE, Action, Block, Launch
from tests.support.ptx.memory import NO_STORES, GlobalMemory
from tests.support.ptx.operations import actions_of
from tests.support.ptx.program import Program, parse_program

INSTRUCTION_MODULES = (arithmetic, bits, conversions, copies, matrices, moves, warpgroups, warps)  # registered by import
THREADS_MAX = 1024
MULTIPROCESSORS = 132
SHARED_BYTES_MAX = 227 * 1024


class EmulatedCard(FakeGpuDriver):
    """`order`: the order of warps and blocks. `transform_ptx` changes the PTX before it is executed. `adds_waits`: wait for a
    product whose result is used too early, as code from the assembler does (ptxas, C7517); otherwise that is a fault.
    `launches_back_to_back`: launches follow one another without synchronisation. `launched` counts blocks by kernel."""

    def __init__(self) -> None:
        self.utils = self
        self.order = LOCKSTEP
        self.transform_ptx: Callable[[str], str] = str
        self.adds_waits = False
        self.launched: Counter[str] = Counter()
        self._reachable: list[torch.Tensor] = []
        self.launches_back_to_back = False
        self._stored = NO_STORES

    @contextmanager
    def with_reachable(self, *tensors: torch.Tensor) -> Iterator[None]:
        """Let launches also access these tensors, whose addresses are stored in a table."""
        self._reachable.extend(tensors)
        try:
            yield
        finally:
            del self._reachable[len(self._reachable) - len(tensors) :]

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES_MAX, "multiprocessor_count": MULTIPROCESSORS}

    def load_binary(self, name: str, binary: bytes, *_: Any) -> tuple[None, str, int, int, int]:
        """Called by Triton for each variant of a kernel."""
        return None, binary.decode(), 0, 0, THREADS_MAX

    def unload_module(self, module: Any) -> None:
        """Nothing was loaded."""

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Return the launcher of one variant. Triton passes all arguments, including constants that were compiled in."""
        passed = [kind != "constexpr" for kind in source.signature.values()]

        def launch(x: int, y: int, z: int, stream: int, ptx: str, *rest: Any) -> None:
            arguments = [value for value, is_passed in zip(rest[-len(passed) :], passed, strict=True) if is_passed]
            self.execute(ptx, arguments, (x, y, z), int(metadata.shared), early=bool(metadata.launch_pdl))

        return launch

    def execute(
        self, ptx: str, arguments: list[Any], grid: tuple[int, int, int], shared_bytes: int, *, early: bool = False
    ) -> None:
        """arguments: scalars and tensors. Raises UnknownPtx and Fault; as on a card, no arithmetic result raises."""
        program, actions = _load_program(self.transform_ptx(ptx))
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        numbers = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments]
        scratch = [0] * (len(program.parameters) - len(numbers))  # of a profiler and of Triton; unused here
        memory = GlobalMemory([*tensors, *self._reachable], self._stored if self.launches_back_to_back else None)
        launch = Launch(program, actions, numbers + scratch, memory, grid, shared_bytes, early, self.adds_waits)
        places = [(x, y, z) for z, y, x in itertools.product(*(range(size) for size in reversed(grid)))]
        with np.errstate(all="ignore"):
            for place in reversed(places) if self.order == REVERSE else places:
                Block(launch, place, self.order).run()
        self.launched[program.name] += len(places)
        self._stored = memory.stored


@functools.cache
def _load_program(ptx: str) -> tuple[Program, list[Action | None]]:
    program = parse_program(ptx)
    return program, actions_of(program)


def clear_programs() -> None:
    """Clear the cache of parsed programs."""
    _load_program.cache_clear()


def keep_ptx_stage(*arguments: Any) -> tuple[str, str]:
    """A hook into Triton's compilation stages (`knobs.runtime.add_stages_inspection_hook`) that makes PTX the last one. Called
    without arguments, by Triton from 3.7 on, it returns a key for its cache."""
    if arguments:
        stages = arguments[1]
        stages["cubin"] = lambda ptx, metadata: ptx.encode()
    return "ptx", "ptx"


def install() -> EmulatedCard:
    """Install the emulator for the rest of the process. Kernels compiled afterwards are not for a card: use another cache."""
    from triton import knobs
    from triton.runtime import driver

    card = EmulatedCard()
    driver.set_active(card)
    knobs.runtime.add_stages_inspection_hook = keep_ptx_stage
    knobs.compilation.disable_line_info = True  # unused here, and a third of the text
    knobs.compilation.store_binary_only = True  # intermediate representations are not needed
    return card
