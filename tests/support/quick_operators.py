"""Faster operators, casts and axis insertion for tensors in Triton's interpreter: one call instead of ten, with the same bits.
For 3.6.0 and 3.9.0; all but plain cases (bfloat16, for example) use the interpreter's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

SUMS = {"__add__": np.add, "__sub__": np.subtract, "__mul__": np.multiply}
COMPARISONS = {
    "__lt__": np.less, "__le__": np.less_equal, "__gt__": np.greater, "__ge__": np.greater_equal, "__eq__": np.equal,
    "__ne__": np.not_equal,
}  # fmt: skip
BITWISE = {"__and__": np.bitwise_and, "__or__": np.bitwise_or, "__xor__": np.bitwise_xor}
OPERATIONS: dict[str, Any] = {**SUMS, **COMPARISONS, **BITWISE}
DTYPES = {
    f"{short}{bits}": np.dtype(f"{kind}{bits}")
    for short, kind, sizes in (
        ("fp", "float", (16, 32, 64)),
        ("int", "int", (8, 16, 32, 64)),
        ("uint", "uint", (8, 16, 32, 64)),
    )
    for bits in sizes
}
"""Types that numpy supports natively, by Triton's name."""
INTEGERS = frozenset(name for name in DTYPES if "int" in name) | {"int1"}


class FastOperators:
    """Makes faster versions of methods of `tensor`. `handle_of`: the interpreter's TensorHandle."""

    def __init__(self, core: Any, handle_of: Any) -> None:
        self._tensor, self._plain, self._boolean, self._handle_of = core.tensor, core.dtype, core.int1, handle_of
        self._types: dict[tuple[str, int], tuple[Any, Any]] = {}  # by the id of a shape, which is kept alive
        self._widened: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def method(self, name: str, called: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
        if name in OPERATIONS:
            return self._operator(name, called, semantic.binary_op_type_checking_impl)
        return self._with_axes(called) if name == "__getitem__" else called

    def cast(self, value: Any, wanted: Any) -> Any:
        """`value` in another type; None if that is not a plain case."""
        kind = value.dtype.name
        if kind not in DTYPES or wanted.name not in DTYPES or (kind == "fp16" and wanted.name != "fp32"):
            return None
        data = value.handle.data.astype(DTYPES[wanted.name])
        return self._holding(data, wanted, self._of_elements(value.type, wanted), value)

    def _holding(self, data: Any, held: Any, kind: Any, like: Any) -> Any:
        """A tensor of type `kind` and the shape of `like`; `held`: the type of its handle."""
        handle, made = self._handle_of.__new__(self._handle_of), self._tensor.__new__(self._tensor)
        handle.data, handle.dtype, handle.attr = data, held, {}
        made.handle, made.type, made.dtype, made.shape, made.numel = handle, kind, kind.scalar, like.shape, like.numel
        return made

    def _of_elements(self, kind: Any, element: Any) -> Any:
        """The type with the shape of `kind` and elements of type `element`."""
        if not kind.is_block():
            return element
        key = (element.name, id(kind.shape))
        known = self._types.get(key)
        if known is None:
            known = self._types[key] = kind.shape, kind.with_element_ty(element)
        return known[1]

    def _operator(self, name: str, called: Callable[..., Any], check: Callable[..., Any]) -> Callable[..., Any]:
        operation, is_comparison = OPERATIONS[name], name in COMPARISONS
        allowed = INTEGERS if name in BITWISE else DTYPES.keys()
        numbers = (int, float) if name in SUMS else ()  # 3.6 converts a number to a tensor before comparing
        tensor, plain, boolean = self._tensor, self._plain, self._boolean

        def computed(lhs: Any, rhs: Any, **known: Any) -> Any:
            other = type(rhs)
            is_plain = rhs.dtype.name in allowed and type(rhs.dtype) is plain if other is tensor else other in numbers
            if not is_plain or lhs.dtype.name not in allowed or type(lhs.dtype) is not plain:
                return called(lhs, rhs, **known)
            lhs, rhs = check(lhs, rhs)
            data = operation(lhs.handle.data, rhs.handle.data)
            return self._holding(data, lhs.dtype, self._of_elements(lhs.type, boolean) if is_comparison else lhs.type, lhs)

        return computed

    def _with_axes(self, called: Callable[..., Any]) -> Callable[..., Any]:
        plain, widened = self._plain, self._widened

        def taken(whole: Any, slices: Any, **known: Any) -> Any:
            kind, data = whole.dtype, whole.handle.data
            if type(slices) is not tuple or type(kind) is not plain or data.ndim != len(whole.shape):
                return called(whole, slices, **known)
            key = (kind.name, id(whole.type.shape), str(slices))
            found = widened.get(key)
            if found is None:
                made = called(whole, slices, **known)
                widened[key] = whole.type.shape, made
                return made
            like = found[1]
            return self._holding(data.reshape(like.handle.data.shape), whole.handle.dtype, like.type, like)

        return taken
