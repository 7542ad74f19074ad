"""The library under Triton's interpreter gives a row of a matrix other bits at another place; no matrix instruction does.

Here the products of the interpreter are summed column by column, alike for every row: what differs now, differs by the kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


def make_dot_row_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dots of the interpreter do not depend on a row's place, for the length of a test."""
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
