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
from kernels.simd.threads import argument, barrier_wait, call_task, pool, run, thread_and_count
from kernels.simd.vectors import load_int64

DESCRIPTOR_WORDS = 24
"""Words of eight bytes in the descriptor of an operation: the address of its task, two words for `thread_and_count`, and its
arguments."""

_TASK, _THREAD_NUM, _THREADS, _ARGUMENTS = range(4)


class Launch:
    """An operation: its task, and the compiled function that runs it from Python. `num_rows_at`: index of the argument with
    the number of rows; `num_floats`: how many of the last arguments are float32."""

    def __init__(self, entry_point: Callable[..., None], task_function: Any, *, num_rows_at: int, num_floats: int = 0) -> None:
        self._entry_point, self._task, self._pool = entry_point, task_function.address, pool()
        self._num_rows_at, self._num_floats = num_rows_at, num_floats

    def __call__(self, work: int, *arguments: float) -> None:
        """Run it on as many threads as `work` justifies, or add it to the sequence that is being recorded."""
        sequence = _recording.sequence
        if sequence is not None:
            num_integers = len(arguments) - self._num_floats
            floats = np.array(arguments[num_integers:], dtype=np.float32).view(np.int32)
            sequence.add(self._task, self._num_rows_at, [*arguments[:num_integers], *floats.tolist()])
        else:
            self._entry_point(self._pool.address, self._pool.num_threads(work), self._task, *arguments)


class _Recording(local):
    """The sequence that each thread is recording, if any."""

    sequence: OperationSequence | None = None


_recording = _Recording()


def empty(*shape: int) -> torch.Tensor:
    """An uninitialised tensor of float32. If a sequence is being recorded, the sequence keeps it."""
    sequence = _recording.sequence
    return torch.empty(shape) if sequence is None else sequence.empty(shape)


_PROLOGUE = 2
"""The index of the buffers for tensors that are made before the first layer."""


class ScratchBuffers:
    """Memory for the tensors of sequences, only one of which runs at a time: buffers by layer, in the order of their use, and
    the tensors that torch allocates."""

    def __init__(self) -> None:
        self.layers: tuple[list[torch.Tensor], ...] = [], [], []  # two that alternate, and `_PROLOGUE`
        self.tensors: list[torch.Tensor] = []


class OperationSequence:
    """Operations over up to `max_rows` rows, one after the other."""

    def __init__(self, max_rows: int, buffers: ScratchBuffers | None = None) -> None:
        self.max_rows = max_rows
        self._buffers = buffers or ScratchBuffers()
        self._descriptors: list[list[int]] = []
        self._num_rows_offsets: list[int] = []
        self._num_rows_index = np.zeros(0, dtype=np.int64)
        self._table = np.zeros((0, DESCRIPTOR_WORDS), dtype=np.int64)
        self._address = 0
        self._layer, self._next_buffer = _PROLOGUE, 0
        self._pool, self._threads, self._num_rows = pool(), 0, 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record, but do not run, the operations called in this context with tensors of `max_rows` rows. Raises
        `NotRecordable`."""
        _recording.sequence = self
        try:
            with _RefuseComputation(self._buffers.tensors):
                yield
        finally:
            _recording.sequence = None
        self._table = np.array(self._descriptors, dtype=np.int64).reshape(-1, DESCRIPTOR_WORDS)
        self._num_rows_index = np.array(self._num_rows_offsets, dtype=np.int64)
        self._address = self._table.ctypes.data

    def sharing_buffers(self, max_rows: int) -> OperationSequence:
        """A record of other operations in the same buffers: running one record overwrites the results of the other."""
        return OperationSequence(max_rows, self._buffers)

    def next_layer(self) -> None:
        """Begin a layer. Its tensors overwrite those of the layer before the last one; tensors made before any layer stay."""
        self._layer, self._next_buffer = 0 if self._layer == _PROLOGUE else 1 - self._layer, 0

    def empty(self, shape: Sequence[int]) -> torch.Tensor:
        """An uninitialised tensor of this layer, in its next buffer if that is large enough."""
        buffers, size = self._buffers.layers[self._layer], math.prod(shape)
        if self._next_buffer == len(buffers):
            buffers.append(torch.empty(size))
        elif buffers[self._next_buffer].numel() < size:
            buffers[self._next_buffer] = torch.empty(size)
        self._next_buffer += 1
        return buffers[self._next_buffer - 1][:size].view(shape)

    def add(self, address: int, num_rows_at: int, arguments: list[Any]) -> None:
        """Record an operation with its arguments, of floats the bits."""
        assert _ARGUMENTS + len(arguments) <= DESCRIPTOR_WORDS, "an operation with more arguments than a descriptor holds"
        self._num_rows_offsets.append(len(self._descriptors) * DESCRIPTOR_WORDS + _ARGUMENTS + num_rows_at)
        self._descriptors.append([address, 0, 1, *arguments, *[0] * (DESCRIPTOR_WORDS - _ARGUMENTS - len(arguments))])

    def run(self, num_rows: int) -> None:
        """Run all operations, over the first `num_rows` rows."""
        assert num_rows <= self.max_rows
        table, workers = self._table, self._pool
        threads = torch.get_num_threads() if workers.address else 1
        if threads != self._threads:
            self._threads = threads
            table[:, _THREAD_NUM] = workers.thread_num if threads > 1 else 0
            table[:, _THREADS] = threads
        if num_rows != self._num_rows:
            self._num_rows = num_rows
            table.reshape(-1)[self._num_rows_index] = num_rows
        _run(workers.address, threads, _RUN_DESCRIPTORS, self._address, len(self._descriptors), workers.barrier)


class _RefuseComputation(TorchDispatchMode):
    """Lets torch make views and allocate tensors, which are kept; refuses to let it compute."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_allocation = func is torch.ops.aten.empty.memory_format
        if not (func.is_view or is_allocation):
            raise NotRecordable(str(func))
        result = func(*args, **(kwargs or {}))
        if is_allocation:
            self._tensors.append(result)
        return result


@task
def _run_descriptors(a):
    descriptors, count, barrier = argument(a, 0), argument(a, 1), argument(a, 2)
    _, threads = thread_and_count(a)
    for index in range(count):
        descriptor = descriptors + index * DESCRIPTOR_WORDS * 8
        call_task(load_int64(descriptor, _TASK), descriptor + _THREAD_NUM * 8)
        if threads > 1:
            barrier_wait(barrier)


_RUN_DESCRIPTORS = _run_descriptors.address


@entry(6)
def _run(pool, threads, task, descriptors, count, barrier):
    run(pool, threads, task, (descriptors, count, barrier))
