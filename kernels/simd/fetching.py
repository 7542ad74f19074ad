"""Memory read before it is needed, in address order, because the computation itself would jump back and forth in it."""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from kernels.simd.vectors import INT32


@intrinsic
def touch(typing, address):
    """Read four bytes and ignore them, so that their line is in the cache. A processor drops prefetches when it has too many. A
    read is never dropped, and the hardware prefetcher follows it to the next lines."""

    def emit(context, builder, sig, args):
        builder.load_atomic(builder.inttoptr(args[0], INT32.as_pointer()), "monotonic", 4)  # never removed as unused
        return context.get_dummy_value()

    return types.void(types.int64), emit
