"""Caches decisions that Triton's interpreter repeats for every operation: the computation type and shape of two operands, and
the conversion of a scalar operand. Results are the same objects or the same bits. For 3.6.0 and 3.9.0, where these decisions
take more of a test's time than numpy.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from tests.support.quick_operators import FastOperators

CONSTANTS_MAX = 1024
"""Number of scalars cached as blocks, usually of at most 64 KiB; the cache is cleared when it is full."""
NUMBERS = (bool, int, float)


def cache_type_decisions() -> None:
    """Install the caches for the rest of the process. Functions of an already patched language stay as they are."""
    core = importlib.import_module("triton.language.core")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    semantic = importlib.import_module("triton.language.semantic").TritonSemantic
    integers = frozenset(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES)
    core.dtype.is_int = lambda kind: kind.name in integers
    core.dtype.__eq__ = compare_identity_first(core.dtype.__eq__)
    vars(core)["_unwrap_if_constexpr"] = unwrap_plain_values_first(core)
    semantic.computation_type_impl = cache_computation_types(semantic.computation_type_impl, core.dtype)
    semantic.broadcast_impl_value = skip_broadcast_of_equal_shapes(semantic.broadcast_impl_value)
    quick = FastOperators(core, interpreter.TensorHandle)
    semantic.cast = skip_cast_to_same_type(semantic.cast, core.dtype, quick)
    semantic.binary_op_type_checking_impl = cache_operand_checks(semantic.binary_op_type_checking_impl, core)
    interpreter.TensorHandle.__post_init__ = cache_width_checks(interpreter.TensorHandle.__post_init__, core)
    vars(interpreter)["_patch_attr"] = patch_without_signature_check(core, semantic, quick)


def compare_identity_first(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """`equal`, preceded by a comparison of identity."""
    return lambda one, other: one is other or equal(one, other)


def unwrap_plain_values_first(core: Any) -> Callable[[Any], Any]:
    """`core._unwrap_if_constexpr` with a fast path: it checks every value for tuples, lists and constants."""
    unwrap, constant = core._unwrap_if_constexpr, core.constexpr
    plain = {core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, str, type(None)}

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is constant else unwrap(value)

    return unwrapped


def cache_computation_types(decide: Callable[..., Any], plain: Any) -> Callable[..., Any]:
    """Cache `decide`, which returns the computation type of two operand types. Errors are raised again each time."""
    found: dict[tuple[Any, ...], Any] = {}

    def decided(self: Any, one: Any, one_is_number: bool, other: Any, other_is_number: bool, div_or_mod: bool) -> Any:
        if type(one) is not plain or type(other) is not plain:
            return decide(self, one, one_is_number, other, other_is_number, div_or_mod)
        key = (one.name, one_is_number, other.name, other_is_number, div_or_mod)
        if key not in found:
            found[key] = decide(self, one, one_is_number, other, other_is_number, div_or_mod)
        return found[key]

    return decided


def have_same_shape(one: Any, other: Any) -> bool:
    """Whether two types are both scalar, or blocks with one shape object (equal shapes are one object: `quick_interpreter`)."""
    if one.is_block():
        return other.is_block() and one.shape is other.shape
    return not other.is_block()


def skip_broadcast_of_equal_shapes(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """`broadcast`, except for operands of equal shapes, which are returned as they are."""
    return lambda self, lhs, rhs: (lhs, rhs) if have_same_shape(lhs.type, rhs.type) else broadcast(self, lhs, rhs)


def skip_cast_to_same_type(cast: Callable[..., Any], plain: Any, quick: FastOperators) -> Callable[..., Any]:
    """`cast`, except for values that have the type already, which are returned as they are."""

    @wraps(cast)
    def casted(self: Any, value: Any, wanted: Any, fp_downcast_rounding: Any = None) -> Any:
        kind = value.dtype
        if type(kind) is plain and type(wanted) is plain:
            if kind.name == wanted.name:
                return value
            made = None if fp_downcast_rounding is not None else quick.cast(value, wanted)
            if made is not None:
                return made
        return cast(self, value, wanted, fp_downcast_rounding)

    return casted


def make_broadcast_types(core: Any) -> Callable[[Any, Any], Any]:
    """Return a function that gives two tensors the type of their common shape and leaves the broadcast of their data to numpy;
    it returns None for incompatible shapes."""
    shapes: dict[tuple[int, int], tuple[Any, Any, Any]] = {}  # by id; the shapes are kept alive
    types: dict[tuple[str, tuple[int, ...]], Any] = {}
    tensor, block, plain = core.tensor, core.block_type, core.dtype

    def found_once(one: Any, other: Any) -> tuple[int, ...] | None:
        sizes = [tuple(getattr(size, "value", size) for size in shape or ()) for shape in (one, other)]
        try:
            return np.broadcast_shapes(*sizes)
        except ValueError:
            return None

    def typed(operand: Any, shape: tuple[int, ...]) -> Any:
        kind = operand.dtype
        if type(kind) is not plain:
            return tensor(operand.handle, block(kind, [*shape]))
        key = (kind.name, shape)
        known = types.get(key)
        if known is None:
            known = types[key] = block(kind, [*shape])
        return tensor(operand.handle, known)

    def together(lhs: Any, rhs: Any) -> Any:
        one, other = (each.type.shape if each.type.is_block() else None for each in (lhs, rhs))
        if one is other:
            return lhs, rhs
        key = (id(one), id(other))
        known = shapes.get(key)
        if known is None:
            known = shapes[key] = one, other, found_once(one, other)
        shape = known[2]
        if shape is None:
            return None
        if one is None or (*one,) != shape:
            lhs = typed(lhs, shape)
        if other is None or (*other,) != shape:
            rhs = typed(rhs, shape)
        return lhs, rhs

    return together


def cache_operand_checks(check: Callable[..., Any], core: Any) -> Callable[..., Any]:
    """Cache `check`, which converts two operands to one type and shape. Operands that need no conversion are checked once per
    type; broadcasting is left to numpy; a scalar converted for a tensor that stayed as it was is cached, read-only."""
    tensor, plain, pointer = core.tensor, core.dtype, core.pointer_type
    together = make_broadcast_types(core)
    stay: dict[tuple[Any, ...], bool] = {}
    constants: dict[tuple[Any, ...], Any] = {}

    @wraps(check)
    def checked(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        flags = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        left, right = type(lhs), type(rhs)
        if left is tensor and right is tensor:
            kind = lhs.dtype
            if (
                type(kind) is plain
                and type(rhs.dtype) is plain
                and kind.name == rhs.dtype.name
                and have_same_shape(lhs.type, rhs.type)
            ):
                kept = (kind.name, *flags)
                if stay.get(kept):
                    return lhs, rhs
                made = check(self, lhs, rhs, *flags)
                stay[kept] = made[0] is lhs and made[1] is rhs
                return made
            if type(rhs.dtype) is plain:
                if type(kind) is plain and arithmetic_check:
                    common = self.computation_type_impl(kind, False, rhs.dtype, False, div_or_mod)
                    made = together(self.cast(lhs, common), self.cast(rhs, common))
                elif type(kind) is pointer and allow_lhs_ptr and rhs.dtype.is_int():
                    made = together(lhs, rhs)
                else:
                    made = None
                if made is not None:
                    return made
        elif (left is tensor and right in NUMBERS) or (right is tensor and left in NUMBERS):
            is_left = right is tensor
            number, operand = (lhs, rhs) if is_left else (rhs, lhs)
            if number == number and (number or type(number) is not float):  # neither NaN nor a signed zero
                key = (type(number), number, is_left, operand.type.name, *flags)
                constant = constants.get(key)
                if constant is None:
                    made = check(self, lhs, rhs, *flags)
                    if made[is_left] is operand:
                        if len(constants) >= CONSTANTS_MAX:
                            constants.clear()
                        constants[key] = made[not is_left]
                        constants[key].handle.data.flags.writeable = False
                    return made
                return (constant, operand) if is_left else (operand, constant)
        return check(self, lhs, rhs, *flags)

    return checked


def cache_width_checks(check: Callable[[Any], None], core: Any) -> Callable[[Any], None]:
    """Cache `check`, which rejects data wider than its type: the largest accepted width of each type, by name."""
    widest: dict[str, int] = {}

    def checked(self: Any) -> None:
        kind = self.dtype
        limit = widest.get(kind.name)
        if limit is None or self.data.itemsize > limit:
            check(self)
            if type(kind) in (core.dtype, core.pointer_type):
                widest[kind.name] = max(self.data.itemsize, limit or 0)

    return checked


def patch_without_signature_check(core: Any, semantic: Any, quick: FastOperators) -> Callable[..., None]:
    """The interpreter's `_patch_attr`, which passes the semantic to functions of the language, without building a dictionary
    and inspecting the function at every call. `quick` provides faster methods of tensors."""
    checking = core.builtin(lambda: None).__code__

    def patch(owner: object, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if getattr(member, "__code__", None) is checking else member
        decides = semantic(builder)

        def called(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = decides
            return function(*args, **kwargs)

        scope.set_attr(owner, name, quick.method(name, called, decides) if owner is core.tensor else called)

    return patch
