"""Memory that is asked for before it is needed, where it lies so that the processor does not see it coming."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.simd.vectors import INT32, emit_call


@intrinsic
def fetch(typing, address):
    """Ask for the line of the cache that holds an address; nothing waits for it."""

    def emit(context, builder, sig, args):
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        emit_call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, INT32(0), INT32(2), INT32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), emit
