"""Corrects bfloat16 arithmetic in Triton's interpreter, which stores bfloat16 as 16-bit integers and computes with those.

Seen in 3.6.0 and 3.9.0. For kernels that rely on bfloat16 arithmetic, such as the exact integers decoded from 4-bit codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch


def correct_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the length of a test, give sums, differences and dots of bfloat16, and integers converted to it, the results of a GPU
    in the interpreter."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    binary: Callable[..., Any] = builder.binary_op
    dot: Callable[..., Any] = builder.create_dot
    cast: Callable[..., Any] = builder.cast_impl

    def is_bf16(handle: Any) -> bool:
        return bool(handle.dtype.scalar == tl.bfloat16)

    def widened(handle: Any) -> Any:
        return (handle.data.astype(np.uint32) << 16).view(np.float32) if is_bf16(handle) else handle.data

    def rounded(values: Any) -> Any:
        exact = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
        return exact.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)

    def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if not is_bf16(left):
            return binary(self, left, right, operation)
        return interpreter.TensorHandle(rounded(operation(widened(left), widened(right))), left.dtype.scalar)

    def create_dot(self: Any, left: Any, right: Any, acc: Any, *rest: Any) -> Any:
        if not is_bf16(left):
            return dot(self, left, right, acc, *rest)
        return interpreter.TensorHandle(np.matmul(widened(left), widened(right)) + acc.data, acc.dtype.scalar)

    def cast_impl(self: Any, source: Any, target_type: Any) -> Any:
        if target_type.scalar == tl.bfloat16 and source.dtype.scalar.is_int():
            return interpreter.TensorHandle(rounded(source.data), target_type.scalar)
        return cast(self, source, target_type)

    monkeypatch.setattr(builder, "cast_impl", cast_impl)
    monkeypatch.setattr(builder, "binary_op", binary_op)
    monkeypatch.setattr(builder, "create_dot", create_dot)
