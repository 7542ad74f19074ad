"""The card that is not there, for Triton: it compiles for an H200, and what it launches is executed on tensors of the CPU.

Triton itself binds arguments, decides what a kernel is specialised for and compiles it; only its last step, the assembler, is
left out: PTX is what it keeps as a binary. Up to the driver a launch is what it is on a card.
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

INSTRUCTION_MODULES = (arithmetic, bits, conversions, copies, matrices, moves, warpgroups, warps)  # entered by being imported
THREADS_MAX = 1024
MULTIPROCESSORS = 132
SHARED_BYTES_MAX = 227 * 1024


class EmulatedCard(FakeGpuDriver):
    """`order`: in which order warps and blocks run. `transform_ptx` changes the text of what is launched. `adds_waits`: as the assembler
    does, which waits for a product where its result is used too early (ptxas, C7517); else that is a fault. `launches_back_to_back`: launches
    follow one another with nothing between them. `launched` counts blocks by kernel."""

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
        """Launches may also reach these, whose addresses stand in a table."""
        self._reachable.extend(tensors)
        try:
            yield
        finally:
            del self._reachable[len(self._reachable) - len(tensors) :]

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES_MAX, "multiprocessor_count": MULTIPROCESSORS}

    def load_binary(self, name: str, binary: bytes, *_: Any) -> tuple[None, str, int, int, int]:
        """Triton calls this for each variant of a kernel."""
        return None, binary.decode(), 0, 0, THREADS_MAX

    def unload_module(self, module: Any) -> None:
        """There is none."""

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """What launches one variant: Triton gives it every argument, of which constants were compiled in."""
        passed = [kind != "constexpr" for kind in source.signature.values()]

        def launch(x: int, y: int, z: int, stream: int, ptx: str, *rest: Any) -> None:
            arguments = [value for value, is_passed in zip(rest[-len(passed) :], passed, strict=True) if is_passed]
            self.execute(ptx, arguments, (x, y, z), int(metadata.shared), early=bool(metadata.launch_pdl))

        return launch

    def execute(
        self, ptx: str, arguments: list[Any], grid: tuple[int, int, int], shared_bytes: int, *, early: bool = False
    ) -> None:
        """arguments: numbers and tensors. Raises UnknownPtx, and Fault; as on a card, no number is an exception."""
        program, actions = _load_program(self.transform_ptx(ptx))
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        numbers = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments]
        scratch = [0] * (len(program.parameters) - len(numbers))  # of a profiler and of Triton: these kernels have none
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
    """What was read of launched kernels; it is read again for whoever launches one again."""
    _load_program.cache_clear()


def keep_ptx_stage(*arguments: Any) -> tuple[str, str]:
    """A hook into Triton's stages (`knobs.runtime.add_stages_inspection_hook`): PTX is the last one. Without arguments Triton
    from 3.7 on asks for a key of its cache."""
    if arguments:
        stages = arguments[1]
        stages["cubin"] = lambda ptx, metadata: ptx.encode()
    return "ptx", "ptx"


def install() -> EmulatedCard:
    """For the rest of the process. Kernels that are compiled afterwards are not for a card: their cache must be another one."""
    from triton import knobs
    from triton.runtime import driver

    card = EmulatedCard()
    driver.set_active(card)
    knobs.runtime.add_stages_inspection_hook = keep_ptx_stage
    knobs.compilation.disable_line_info = True  # nobody reads it here, and it is a third of the text
    knobs.compilation.store_binary_only = True  # nor what a kernel is on its way to PTX
    return card
