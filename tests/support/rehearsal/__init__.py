"""A card that is not there: the real code for GPUs runs on it, late, and what would break on a first GPU breaks here.

    with rehearsal() as card:
        engine = build_engine(EngineOptions(model=..., device="cuda"))

Tensors say that they are on cuda:0 and lie in main memory (`tensors`). Streams are queues that run when somebody waits for them
(`card`), graphs are lists of what was launched (`graphs`), freed memory turns to garbage (`memory`), kernels of Triton run in
its interpreter (`interpreted`). It shows wrong results and raises errors where a GPU would; it shows nothing of speed, of
compilers and libraries, of races inside a kernel, and nothing of threads: one thread uses the card.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from tests.support.rehearsal.card import DEFAULT_BYTES, H100, H200, Card, Kind, Schedule, Sync, begin, end
from tests.support.rehearsal.cuda import replace_torch_cuda
from tests.support.rehearsal.interpreted import launch_interpreted_kernels
from tests.support.rehearsal.tensors import DEVICE, mode

__all__ = ["DEVICE", "H100", "H200", "Card", "Kind", "Schedule", "Sync", "rehearsal"]


@contextmanager
def rehearsal(
    schedule: Schedule = Schedule.LATE,
    *,
    seed: int = 0,
    total_bytes: int = DEFAULT_BYTES,
    kind: Kind = H200,
    runs_kernels: bool = True,
) -> Iterator[Card]:
    """A card for as long as the context lasts. Its tensors are of no use afterwards. Without `runs_kernels` those of Triton are
    launched, captured and replayed as always, but compute nothing: for what looks at no result and would take minutes."""
    card = Card(schedule=schedule, seed=seed, total_bytes=total_bytes, kind=kind)
    begin(card)
    try:
        with ExitStack() as stack:
            stack.enter_context(replace_torch_cuda(card))
            stack.enter_context(launch_interpreted_kernels(runs=runs_kernels))
            stack.enter_context(mode())
            if runs_kernels:  # the interpreter compiles nothing, and takes its time
                stack.enter_context(mock.patch("engine.build.compile_steps"))
            yield card
    finally:
        end(card)
