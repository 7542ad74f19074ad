"""Makes dots in Triton's interpreter independent of a row's position, as matrix instructions are.

The library under the interpreter gives a row different bits at different positions. Here products are summed column by column,
in the same way for every row, so that any remaining difference comes from the kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


def make_dot_row_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the length of a test, make dots of the interpreter independent of a row's position."""
    import triton.language as tl
    from triton.runtime import interpreter

    def floats(handle: Any) -> Any:
        if handle.dtype.primitive_bitwidth == 8 and handle.dtype.is_floating():
            return interpreter._convert_float(handle.data, handle.dtype, tl.float16, None).view(np.float16)
        return handle.data

    def create_dot(_: Any, left: Any, right: Any, acc: Any, *_rest: Any) -> Any:
        kind = acc.data.dtype
        rows, columns = floats(left).astype(kind), floats(right).astype(kind)
        total = (rows[..., :, :, None] * columns[..., None, :, :]).sum(axis=-2, dtype=kind)
        return interpreter.TensorHandle(total + acc.data, acc.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
