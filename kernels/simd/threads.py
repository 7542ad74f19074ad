"""Teams of threads from the pool that torch already has.

torch brings an OpenMP runtime whose threads wait for work in a loop. A second pool would take their cores from them, so
functions compiled here run in that same pool: through `GOMP_parallel`, the call that compilers generate for a parallel section,
found in the library that the process has loaded. If the library has no such call, everything runs in the calling thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.simd.compiling import subroutine
from kernels.simd.vectors import INT32, INT64, load_float32, load_int64

WORK_PER_THREAD = 1 << 15
"""Multiplications, or elements read and written, that justify another thread: about ten microseconds."""

_RUNTIMES = ("libgomp", "libomp", "libiomp5")


class Pool:
    """The runtime's addresses in the form that compiled functions take: `address` is that of a table, 0 without a runtime;
    `thread_num` is the function that returns a thread's number, `barrier` the one that waits for all threads of a team."""

    def __init__(self, library: ctypes.CDLL | None) -> None:
        names = ("GOMP_parallel", "omp_get_thread_num", "GOMP_barrier")
        addresses = [0 if library is None else _address(getattr(library, name)) for name in names]
        self._addresses = np.array(addresses, dtype=np.int64)
        self.address = 0 if library is None else self._addresses.ctypes.data
        _, self.thread_num, self.barrier = addresses

    def num_threads(self, work: int) -> int:
        """The number of threads for `work`, at most torch's."""
        if work < 2 * WORK_PER_THREAD or not self.address:
            return 1
        return min(torch.get_num_threads(), work // WORK_PER_THREAD)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@cache
def pool() -> Pool:
    """The pool of this process."""
    for path in _loaded_runtimes():
        library = ctypes.CDLL(path)
        if hasattr(library, "GOMP_parallel") and hasattr(library, "GOMP_barrier"):
            return Pool(library)
    return Pool(None)


def _loaded_runtimes() -> Iterator[str]:
    """Files of loaded OpenMP runtimes, torch's own first."""
    maps = Path("/proc/self/maps")
    paths = {line.split()[-1] for line in maps.read_text("utf-8").splitlines() if "/" in line} if maps.exists() else set()
    if not paths:
        paths = {str(path) for path in Path(torch.__file__).parent.glob("lib/lib*omp*")}
    runtimes = [path for path in paths if Path(path).name.startswith(_RUNTIMES)]
    yield from sorted(runtimes, key=lambda path: "torch" not in path)


@intrinsic
def run(typing, pool, threads, task, arguments):
    """Run the task at the address `task` on `threads` threads of the pool at the address `pool`; returns when all have ended.

    A task gets the address of words of eight bytes: 0 and 1 are for `thread_and_count`, the arguments follow, integers or, in
    the lower half of a word, float32.
    """

    def emit(context, builder, sig, args):
        pool, threads, task, arguments = args
        values = [builder.extract_value(arguments, index) for index in range(len(sig.args[3]))]
        values = [value if value.type == INT64 else builder.zext(builder.bitcast(value, INT32), INT64) for value in values]
        frame = cgutils.alloca_once(builder, INT64, size=len(values) + 2)
        for index, value in enumerate([INT64(0), threads, *values]):
            builder.store(value, builder.gep(frame, [INT64(index)]))
        address = builder.ptrtoint(frame, INT64)
        task_type = ir.FunctionType(ir.VoidType(), [INT64])
        with builder.if_else(builder.icmp_signed(">", threads, INT64(1))) as (parallel, serial):
            with parallel:
                addresses = builder.inttoptr(pool, INT64.as_pointer())
                builder.store(builder.load(builder.gep(addresses, [INT64(1)])), frame)
                parallel_type = ir.FunctionType(ir.VoidType(), [INT64, INT64, INT32, INT32])
                function = builder.inttoptr(builder.load(addresses), parallel_type.as_pointer())
                builder.call(function, [task, address, builder.trunc(threads, INT32), INT32(0)])
            with serial:
                builder.call(builder.inttoptr(task, task_type.as_pointer()), [address])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, arguments), emit


@intrinsic
def _call_int(typing, function):
    """Call a function without arguments that returns an int."""

    def emit(context, builder, sig, args):
        function_type = ir.FunctionType(INT32, [])
        return builder.sext(builder.call(builder.inttoptr(args[0], function_type.as_pointer()), []), INT64)

    return types.int64(types.int64), emit


@intrinsic
def barrier_wait(typing, function):
    """Wait, by `Pool.barrier`, until all threads of the team have reached this call; their writes are then visible to all."""

    def emit(context, builder, sig, args):
        builder.call(builder.inttoptr(args[0], ir.FunctionType(ir.VoidType(), []).as_pointer()), [])
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def call_task(typing, task, arguments):
    """Call a task, in this thread, with the address of its arguments."""

    def emit(context, builder, sig, args):
        task_type = ir.FunctionType(ir.VoidType(), [INT64])
        builder.call(builder.inttoptr(args[0], task_type.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@subroutine
def thread_and_count(arguments):
    """The index of the thread that runs the task, and the number of threads of its team."""
    function = load_int64(arguments, 0)
    return (_call_int(function) if function else 0), load_int64(arguments, 1)


@subroutine
def thread_range(arguments, count):
    """First and end of the range of indices below `count` that this thread processes."""
    index, threads = thread_and_count(arguments)
    return count * index // threads, count * (index + 1) // threads


@subroutine
def argument(arguments, index):
    """Argument `index` of a task, an integer."""
    return load_int64(arguments, index + 2)


@subroutine
def float_argument(arguments, index):
    """Argument `index` of a task, a float32: the lower half of its word."""
    return load_float32(arguments, 2 * (index + 2))
