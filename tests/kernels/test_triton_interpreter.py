"""The interpreter of these tests: see tests/support/quick_interpreter.py."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl

from kernels.triton.rows.norm import rms_norm
from tests.support.kernel_device import interpret_without_gpu

KINDS = (tl.float32, tl.float16, tl.int32, tl.int64, tl.int1, tl.pointer_type(tl.int32))
MORE_KINDS = (*KINDS, tl.float64, tl.int8, tl.uint8, tl.uint32, tl.bfloat16, tl.float8e4nv)


def test_a_second_launch_reuses_the_patched_language(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.ones(1, 64), torch.ones(64)
    rms_norm(x, weight, 1e-6)
    replaced: list[object] = []
    interpreter = importlib.import_module("triton.runtime.interpreter")
    monkeypatch.setattr(interpreter, "_patch_attr", lambda *replacement: replaced.append(replacement))
    rms_norm(x, weight, 1e-6)
    assert not replaced


def test_the_interpreter_is_refused_if_a_gpu_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEHOUSE_REQUIRE", "postgres,gpu")
    with pytest.raises(AssertionError, match="GATEHOUSE_REQUIRE names gpu"):
        interpret_without_gpu()


def test_every_bfloat16_is_converted_to_float32_and_back_as_by_torch() -> None:
    interpreter = importlib.import_module("triton.runtime.interpreter")
    codes = np.arange(1 << 16, dtype=np.uint16)
    widened = interpreter._convert_float(codes, tl.bfloat16, tl.float32, None)
    expected = torch.from_numpy(codes.view(np.int16)).view(torch.bfloat16).float().view(torch.int32).numpy()
    np.testing.assert_array_equal(widened.view(np.int32), expected)
    narrowed = interpreter._convert_float(widened.view(np.float32), tl.float32, tl.bfloat16, None)
    np.testing.assert_array_equal(narrowed, codes)


def test_cached_block_types_equal_new_ones() -> None:
    kinds = [tl.float32, tl.int32, tl.pointer_type(tl.float32), tl.pointer_type(tl.int32)]
    for shape in ([2, 4], [4, 2], [8]):
        first = [tl.block_type(kind, shape) for kind in kinds]
        again = [tl.block_type(kind, shape) for kind in kinds]
        assert again == first
        assert [(kind.name, list(kind.shape), kind.numel) for kind in again] == [
            (f"<{[str(size) for size in shape]}, {kind}>", shape, 8) for kind in kinds
        ]
        assert [kind.element_ty for kind in again] == kinds
    for _ in range(2):
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.float32, [3])


@pytest.mark.parametrize("kind", [tl.float32, tl.float16, tl.int32, tl.uint32, tl.int64, tl.int1, tl.pointer_type(tl.int32)])
def test_scalar_promotion_equals_that_of_triton(kind: tl.dtype) -> None:
    interpreter = importlib.import_module("triton.runtime.interpreter")
    semantic = interpreter.interpreter_semantic
    quick, plain = semantic.binary_op_type_checking_impl, type(semantic).binary_op_type_checking_impl.__wrapped__
    zeros = np.zeros(4, interpreter._get_np_dtype(kind))
    block = tl.tensor(interpreter.TensorHandle(zeros, kind), tl.block_type(kind, [4]))
    single = tl.tensor(interpreter.TensorHandle(zeros[:1], kind), kind)

    def told(check: Callable[..., Any], operands: tuple[Any, ...], flags: tuple[bool, ...]) -> object:
        try:
            made = check(*operands, *flags)
        except Exception as error:  # Triton's own, numpy's warnings among them
            return type(error), str(error)
        return [(str(each.type), each.handle.data.dtype, each.handle.data.tobytes()) for each in made]

    numbers = (0, 1, True, False, -1, 7, 1 << 31, 1 << 40, 0.0, -0.0, 1.0, 0.1, -2.5, 1e39, float("inf"), float("nan"))
    for operand in (block, single):
        for number in (*numbers, operand):
            for operands in ((operand, number), (number, operand)):
                for flags in product((False, True), repeat=4):
                    expected = told(partial(plain, semantic), operands, flags)
                    assert [told(quick, operands, flags) for _ in range(2)] == [expected] * 2, (operands, flags)


def test_equal_shapes_are_one_object() -> None:
    kinds = [tl.block_type(kind, shape) for kind in (tl.float32, tl.int1) for shape in ([2, 4], [tl.constexpr(2), 4])]
    assert len({id(kind.shape) for kind in kinds}) == 1
    assert kinds[0].shape is not tl.block_type(tl.float32, [4, 2]).shape


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_type_promotion_and_broadcasting_equal_those_of_triton(first: tl.dtype, second: tl.dtype) -> None:
    interpreter = importlib.import_module("triton.runtime.interpreter")
    semantic = interpreter.interpreter_semantic
    quick, plain = semantic.binary_op_type_checking_impl, type(semantic).binary_op_type_checking_impl.__wrapped__

    def made(kind: tl.dtype, shape: list[int]) -> tl.tensor:
        numbers = np.arange(max(1, int(np.prod(shape)))).reshape(shape or [1]).astype(interpreter._get_np_dtype(kind))
        return tl.tensor(interpreter.TensorHandle(numbers, kind), tl.block_type(kind, shape) if shape else kind)

    def told(check: Callable[..., Any], operands: tuple[Any, ...], flags: tuple[bool, ...]) -> object:
        try:
            found = check(*operands, *flags)
        except Exception as error:
            return type(error), str(error)
        whole = np.broadcast_arrays(*(each.handle.data for each in found))
        return [
            (str(each.type), str(each.handle.dtype), data.dtype, data.tobytes())
            for each, data in zip(found, whole, strict=True)
        ]

    shapes: tuple[list[int], ...] = ([], [1], [4], [2, 4], [2, 1], [4, 2, 4])
    for one, other in product(shapes, repeat=2):
        operands = made(first, one), made(second, other)
        for flags in product((False, True), repeat=4):
            expected = told(partial(plain, semantic), operands, flags)
            assert [told(quick, operands, flags) for _ in range(2)] == [expected] * 2, (one, other, flags)


OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "less_than": operator.lt, "less_equal": operator.le,
    "greater_than": operator.gt, "greater_equal": operator.ge, "equal": operator.eq, "not_equal": operator.ne,
    "and_": operator.and_, "or_": operator.or_, "xor_": operator.xor,
}  # fmt: skip


def numbered(kind: tl.dtype, shape: list[int], begin: int = 0) -> tl.tensor:
    interpreter = importlib.import_module("triton.runtime.interpreter")
    numbers = np.arange(begin, begin + max(1, int(np.prod(shape)))) % 5
    data = numbers.reshape(shape or [1]).astype(interpreter._get_np_dtype(kind))
    return tl.tensor(interpreter.TensorHandle(data, kind), tl.block_type(kind, shape) if shape else kind)


def told(compute: Callable[..., Any], *operands: Any) -> object:
    """Return all properties of a result, or the error message."""
    try:
        found = compute(*operands)
    except Exception as error:
        return type(error), str(error)
    handle = found.handle
    sizes = handle.data.shape, [int(size) for size in found.shape], int(found.numel)
    return str(found.type), found.dtype, str(handle.dtype), handle.data.dtype, handle.data.tobytes(), sizes


@pytest.mark.parametrize("first", MORE_KINDS)
def test_operators_give_the_results_of_triton(first: tl.dtype) -> None:
    rms_norm(torch.ones(1, 64), torch.ones(64), 1e-6)  # behind which tensors have the interpreter's operators
    semantic = importlib.import_module("triton.runtime.interpreter").interpreter_semantic
    shapes: tuple[tuple[list[int], list[int]], ...] = (([], []), ([], [4]), ([4], []), ([4], [4]), ([2, 4], [2, 1]))
    for name, quick in OPERATORS.items():
        is_sum = name in ("add", "sub", "mul")
        plain = partial(getattr(semantic, name), **({"sanitize_overflow": False} if is_sum else {}))
        for one, other in shapes:
            operands = [numbered(kind, other, 1) for kind in MORE_KINDS]
            for operand in [*operands, *((2, -1, 0.5, float("nan")) if is_sum else ())]:
                pair = numbered(first, one), operand
                assert told(quick, *pair) == told(plain, *pair), (name, one, other, operand)


@pytest.mark.parametrize("kind", MORE_KINDS)
def test_casts_equal_those_of_triton(kind: tl.dtype) -> None:
    semantic = importlib.import_module("triton.runtime.interpreter").interpreter_semantic
    plain = partial(type(semantic).cast.__wrapped__, semantic)
    for shape, wanted in product(([], [4], [2, 4]), MORE_KINDS):
        value = numbered(kind, shape)
        assert told(semantic.cast, value, wanted) == told(plain, value, wanted), (shape, wanted)


def test_cached_expand_dims_equals_that_of_triton() -> None:
    rms_norm(torch.ones(1, 64), torch.ones(64), 1e-6)
    interpreter = importlib.import_module("triton.runtime.interpreter")
    numbers = np.arange(8, dtype=np.float32).reshape(2, 4)
    for data in (numbers, numbers + 1):
        block = tl.tensor(interpreter.TensorHandle(data, tl.float32), tl.block_type(tl.float32, [2, 4]))
        for sizes, found in (((1, 2, 4), block[None, :, :]), ((2, 1, 4), block[:, None, :]), ((2, 4, 1), block[:, :, None])):
            assert (str(found.type), int(found.numel)) == (str(tl.block_type(tl.float32, [*sizes])), 8)
            np.testing.assert_array_equal(found.handle.data, data.reshape(sizes))
        with pytest.raises(ValueError, match="tensor index"):
            block[0:1, :]
