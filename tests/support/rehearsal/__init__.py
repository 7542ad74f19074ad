"""An emulated GPU for the real GPU code: it executes work as late as possible, to expose faults that a real GPU would show.

    with rehearsal() as card:
        engine = build_engine(EngineOptions(model=..., device="cuda"))

Tensors report cuda:0 as their device and are stored in main memory (`tensors`). Streams are queues that run when the host waits
for them (`card`), graphs are lists of launches (`graphs`), freed memory becomes garbage (`memory`), and Triton kernels run in
its interpreter (`interpreted`). It produces wrong results and raises errors where a GPU would. It does not model speed,
compilers, libraries, races within a kernel or threads: only one thread may use the card.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from engine.runner.kernel_choices import KernelChoices
from tests.support.rehearsal.card import DEFAULT_BYTES, H100, H200, Card, Kind, Schedule, Sync, begin, end
from tests.support.rehearsal.cuda import replace_torch_cuda
from tests.support.rehearsal.interpreted import launch_interpreted_kernels
from tests.support.rehearsal.tensors import DEVICE, mode

__all__ = ["DEVICE", "H100", "H200", "Card", "Kind", "Schedule", "Sync", "rehearsal"]


def _compile_nothing(*_: object, **__: object) -> None:
    """Not a mock, which would keep the decoders that it was called with."""


def _defaults(*_: object, **__: object) -> KernelChoices:
    return KernelChoices(None)


@contextmanager
def rehearsal(
    schedule: Schedule = Schedule.LATE,
    *,
    seed: int = 0,
    total_bytes: int = DEFAULT_BYTES,
    kind: Kind = H200,
    runs_kernels: bool = True,
    times_kernels: bool = False,
) -> Iterator[Card]:
    """Emulate a card inside the block; its tensors are invalid afterwards. Without `runs_kernels`, Triton kernels are launched,
    captured and replayed as usual but compute nothing: for tests that need no results and would take minutes. Unless
    `times_kernels`, engines serve by the default kernels and time no others."""
    card = Card(schedule=schedule, seed=seed, total_bytes=total_bytes, kind=kind)
    begin(card)
    try:
        with ExitStack() as stack:
            stack.enter_context(replace_torch_cuda(card))
            stack.enter_context(launch_interpreted_kernels(runs=runs_kernels))
            stack.enter_context(mode())
            if not times_kernels:
                stack.enter_context(mock.patch.object(KernelChoices, "of", _defaults))
            if runs_kernels:  # the interpreter is slow, and has nothing to compile
                for name in ("compile_steps", "compile_texts"):
                    stack.enter_context(mock.patch(f"engine.build.{name}", _compile_nothing))
            yield card
    finally:
        end(card)
