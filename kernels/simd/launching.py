"""Operations called from Python, and sequences of them: many operations in one call and one parallel section.

A decode step of a small model is some sixty operations of some microseconds each. Calling them from Python one by one, with a
parallel section for each, takes as long as a quarter of the step. They are the same in every step except for the number of
rows. So they are recorded once, with the fixed addresses of their tensors, and later run by one call, in which the threads meet
at a barrier after each operation. The tasks and their arguments are the same, and so are the bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import local
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.recorded_operations import NotRecordable
from kernels.simd.compiling import entry, task
from kernels.simd.threads import argument, call_task, member, pool, run, wait
from kernels.simd.vectors import get_int64

LINE = 24
"""Numbers of eight bytes in a line of a sequence: a task's address, two numbers for `member`, and its arguments."""

_TASK, _FUNCTION, _THREADS, _ARGUMENTS = range(4)


class Launch:
    """An operation: its task, and the compiled function that runs it from Python. `rows_at`: index of the argument with the
    number of rows; `num_floats`: how many of the last arguments are float32."""

    def __init__(self, compiled: Callable[..., None], a_task: Any, *, rows_at: int, num_floats: int = 0) -> None:
        self._compiled, self._task, self._team = compiled, a_task.address, pool()
        self._rows_at, self._num_floats = rows_at, num_floats

    def __call__(self, work: int, *arguments: float) -> None:
        """Run it on as many threads as `work` justifies, or add it to the sequence that is being recorded."""
        sequence = _recording.sequence
        if sequence is not None:
            first = len(arguments) - self._num_floats
            floats = np.array(arguments[first:], dtype=np.float32).view(np.int32)
            sequence.add(self._task, self._rows_at, [*arguments[:first], *floats.tolist()])
        else:
            self._compiled(self._team.address, self._team.threads(work), self._task, *arguments)


class _Recording(local):
    """The sequence that each thread is recording, if any."""

    sequence: OperationSequence | None = None


_recording = _Recording()


def new(*shape: int) -> torch.Tensor:
    """An uninitialised tensor of float32. If a sequence is being recorded, the sequence keeps it."""
    sequence = _recording.sequence
    return torch.empty(shape) if sequence is None else sequence.new(shape)


_BEFORE = 2


class ScratchBuffers:
    """Memory for the tensors of sequences, only one of which runs at a time: by layer and in order, and tensors made by
    torch."""

    def __init__(self) -> None:
        self.layers: tuple[list[torch.Tensor], ...] = [], [], []  # two in alternation, and one for before the first layer
        self.kept: list[torch.Tensor] = []


class OperationSequence:
    """Operations over up to `max_rows` rows, one after the other."""

    def __init__(self, max_rows: int, buffers: ScratchBuffers | None = None) -> None:
        self.max_rows = max_rows
        self._buffers = buffers or ScratchBuffers()
        self._lines: list[list[int]] = []
        self._row_cells: list[int] = []
        self._cells = np.zeros(0, dtype=np.int64)
        self._table = np.zeros((0, LINE), dtype=np.int64)
        self._address = 0
        self._layer, self._next = _BEFORE, 0
        self._team, self._threads, self._num_rows = pool(), 0, 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record, but do not run, the operations called in this context with tensors of `max_rows` rows. Raises
        `NotRecordable`."""
        _recording.sequence = self
        try:
            with _NothingComputed(self._buffers.kept):
                yield
        finally:
            _recording.sequence = None
        self._table = np.array(self._lines, dtype=np.int64).reshape(-1, LINE)
        self._cells = np.array(self._row_cells, dtype=np.int64)
        self._address = self._table.ctypes.data

    def sharing_buffers(self, max_rows: int) -> OperationSequence:
        """A record of other operations in the same buffers: running one record overwrites the results of the other."""
        return OperationSequence(max_rows, self._buffers)

    def next_layer(self) -> None:
        """Begin a layer. Its tensors overwrite those of the layer before the last one; tensors made before any layer stay."""
        self._layer, self._next = 0 if self._layer == _BEFORE else 1 - self._layer, 0

    def new(self, shape: Sequence[int]) -> torch.Tensor:
        """An uninitialised tensor of this layer, in its next buffer if that is large enough."""
        buffers, size = self._buffers.layers[self._layer], math.prod(shape)
        if self._next == len(buffers):
            buffers.append(torch.empty(size))
        elif buffers[self._next].numel() < size:
            buffers[self._next] = torch.empty(size)
        self._next += 1
        return buffers[self._next - 1][:size].view(shape)

    def add(self, address: int, rows_at: int, numbers: list[Any]) -> None:
        """Record an operation with its arguments; floats as encoded by `threads.bits`."""
        assert _ARGUMENTS + len(numbers) <= LINE, "an operation with more arguments than a line has"
        self._row_cells.append(len(self._lines) * LINE + _ARGUMENTS + rows_at)
        self._lines.append([address, 0, 1, *numbers, *[0] * (LINE - _ARGUMENTS - len(numbers))])

    def run(self, num_rows: int) -> None:
        """Run all operations, over the first `num_rows` rows."""
        assert num_rows <= self.max_rows
        table, team = self._table, self._team
        threads = torch.get_num_threads() if team.address else 1
        if threads != self._threads:
            self._threads = threads
            table[:, _FUNCTION] = team.member if threads > 1 else 0
            table[:, _THREADS] = threads
        if num_rows != self._num_rows:
            self._num_rows = num_rows
            table.reshape(-1)[self._cells] = num_rows
        _run(team.address, threads, _IN_ORDER, self._address, len(self._lines), team.barrier)


class _NothingComputed(TorchDispatchMode):
    """Allows torch to make views, and tensors, which it keeps; refuses computations by torch."""

    def __init__(self, kept: list[torch.Tensor]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_made = func is torch.ops.aten.empty.memory_format
        if not (func.is_view or is_made):
            raise NotRecordable(str(func))
        result = func(*args, **(kwargs or {}))
        if is_made:
            self._kept.append(result)
        return result


@task
def _in_order(a):
    lines, count, barrier = argument(a, 0), argument(a, 1), argument(a, 2)
    _, threads = member(a)
    for index in range(count):
        line = lines + index * LINE * 8
        call_task(get_int64(line, _TASK), line + _FUNCTION * 8)
        if threads > 1:
            wait(barrier)


_IN_ORDER = _in_order.address


@entry(6)
def _run(pool, threads, task, lines, count, barrier):
    run(pool, threads, task, (lines, count, barrier))
