"""Removes redundant work from Triton's interpreter. Results have the same bits, except for subnormal bfloat16 numbers, which
the interpreter itself gets wrong.

The interpreter patches the whole language, some hundred names, at each launch and each call of a function by a kernel; checks
for integer overflow and discards the result; builds a table of all types for each lookup; validates and formats a block's shape
for each result. Seen in 3.6.0 and 3.9.0, where this takes a large part of a test's time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tests.support.quick_semantic import cache_type_decisions


def replace_language_once() -> None:
    """Patch the language for the functions of a module once, at their first use, for the rest of the process, and speed up its
    operations. Nothing can be compiled in such a process."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    replace_language: Callable[[Any], Any] = interpreter._patch_lang
    replaced: set[str] = set()

    def replace_once(function: Any) -> Any:
        if function.__module__ not in replaced:
            replace_language(function)
            replaced.add(function.__module__)
        return interpreter._LangPatchScope()  # the end of a launch then has nothing to restore

    vars(interpreter)["_patch_lang"] = replace_once
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "what finds an overflow raises in debugging alone"
    builder.options = replace(builder.options, sanitize_overflow=False)
    vars(interpreter)["_get_np_dtype"] = cache_by_type_name(interpreter._get_np_dtype)
    vars(interpreter)["_convert_float"] = convert_by_table_or_shift(interpreter._convert_float)
    core = importlib.import_module("triton.language.core")
    core.block_type.__init__ = cache_block_shapes(core.block_type.__init__, core.dtype)
    core.tensor.__init__ = cache_tensor_sizes(core.tensor.__init__)
    cache_type_decisions()


def cache_by_type_name(look_up: Callable[[Any], np.dtype[Any]]) -> Callable[[Any], np.dtype[Any]]:
    """Cache `look_up`, which returns numpy's dtype of a Triton type, by the type's name."""
    found: dict[str, np.dtype[Any]] = {}

    def by_name(kind: Any) -> np.dtype[Any]:
        name = kind.name
        if name not in found:
            found[name] = look_up(kind)
        return found[name]

    return by_name


def convert_by_table_or_shift(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `convert`, which converts floats through their fields: from 8 bits by a table of all values, between bfloat16 and
    float32 by a shift."""
    tables: dict[tuple[str, str], Any] = {}

    def converted(values: Any, kind: Any, wanted: Any, rounding: Any) -> Any:
        if kind.primitive_bitwidth == 8:
            names = (kind.name, wanted.name)
            if names not in tables:
                tables[names] = convert(np.arange(256, dtype=np.uint8), kind, wanted, rounding)
            return tables[names][values.view(np.uint8)]
        if kind.name == "bf16" and wanted.name == "fp32":
            return values.astype(np.uint32) << np.uint32(16)
        if kind.name == "fp32" and wanted.name == "bf16" and rounding is None:
            return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return convert(values, kind, wanted, rounding)

    return converted


def cache_block_shapes(make: Callable[..., None], plain: Any) -> Callable[..., None]:
    """Cache what `make`, the constructor of block types, derives from a shape; equal shapes become one object."""
    found: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], Any] = {}
    sizes: dict[int, tuple[int, ...]] = {}  # by the identity of each of `shapes`

    def make_known(self: Any, element_ty: Any, shape: Any) -> None:
        known_sizes = sizes.get(id(shape)) or (*[getattr(size, "value", size) for size in shape],)
        key = (element_ty.name if type(element_ty) is plain else str(element_ty), known_sizes)
        known = found.get(key)
        if known is None:
            make(self, element_ty, shape)
            self.shape = shapes.setdefault(known_sizes, self.shape)
            sizes[id(self.shape)] = known_sizes
            found[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
        else:
            self.element_ty = element_ty
            vars(self).update(known)

    return make_known


def cache_tensor_sizes(make: Callable[..., None]) -> Callable[..., None]:
    """Cache the shape in Triton's own numbers that `make`, the constructor of tensors, computes, by the type's shape object."""
    found: dict[int, tuple[Any, Any, Any]] = {}

    def make_known(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else None
        known = found.get(id(shape))
        if known is None:
            make(self, handle, type)
            found[id(shape)] = shape, self.shape, self.numel  # the shape stays alive, so that its id stays valid
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            _, self.shape, self.numel = known

    return make_known
