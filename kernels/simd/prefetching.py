"""Prefetching by loads, in address order, for computations that themselves jump back and forth in memory."""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from kernels.simd.vectors import INT32


@intrinsic
def load_and_discard(typing, address):
    """Load four bytes and discard them, to bring their line into the cache. A processor drops prefetches when it has too many.
    A load is never dropped, and the hardware prefetcher continues with the next lines."""

    def emit(context, builder, sig, args):
        builder.load_atomic(builder.inttoptr(args[0], INT32.as_pointer()), "monotonic", 4)  # never removed as unused
        return context.get_dummy_value()

    return types.void(types.int64), emit
