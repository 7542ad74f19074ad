"""Memory that is read before it is needed, in the order in which it lies, where the work itself would go to and fro in it."""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from kernels.simd.vectors import INT32


@intrinsic
def touch(typing, address):
    """Read four bytes, whatever they are, so that the cache has the line that holds them. Unlike a request to fetch it, which a
    processor drops when it has too many, this takes part in what it foresees: the lines behind come by themselves."""

    def emit(context, builder, sig, args):
        builder.load_atomic(builder.inttoptr(args[0], INT32.as_pointer()), "monotonic", 4)  # never left out as unused
        return context.get_dummy_value()

    return types.void(types.int64), emit
