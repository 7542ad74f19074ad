"""Shapes, strides and dtypes of an operation's outputs before it runs, from torch's meta device, cached per signature."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.rehearsal.leaves import map_leaves


class Geometry:
    """Size, strides and dtype of a future tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.of = tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype


_cached_shapes: dict[Any, Any] = {}


def output_geometry(func: Any, args: Any, kwargs: Any) -> Any:
    """The outputs with `Geometry` in place of tensors; None if torch cannot infer them."""
    key = func, repr(map_leaves(_describe, (args, kwargs)))
    if key not in _cached_shapes:
        _cached_shapes[key] = _compute_on_meta(func, args, kwargs)
    return _cached_shapes[key]


def _describe(value: Any) -> Any:
    return (tuple(value.size()), value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


def _compute_on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    def on_meta(each: Any) -> Any:
        if isinstance(each, torch.Tensor) and (each.is_cuda or each.dim()):
            return torch.empty_strided(each.size(), each.stride(), dtype=each.dtype, device="meta")
        return torch.device("meta") if isinstance(each, torch.device) else each

    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    meta_args, meta_kwargs = map_leaves(on_meta, (args, kwargs))
    try:
        with _disable_current_modes(), torch.inference_mode():
            found = func(*meta_args, **meta_kwargs)
    except (NotImplementedError, RuntimeError):
        return None
    return map_leaves(lambda each: Geometry(each) if isinstance(each, torch.Tensor) else each, found)
