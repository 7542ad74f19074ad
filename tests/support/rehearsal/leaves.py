"""Leaves of nested lists, tuples and dictionaries, as in arguments; `torch.utils._pytree` is more general and slower.

A rehearsal spends much of its time here, hence the fast paths for Python's own three container types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

PLAIN = {int, float, bool, str, slice, type(None), torch.dtype, torch.layout, torch.memory_format}
"""Types of leaves that are never replaced: functions are not called for them."""


def leaves_of(value: Any) -> list[Any]:
    """All leaves, in order."""
    found: list[Any] = []
    _gather(value, found)
    return found


def _gather(value: Any, found: list[Any]) -> None:
    kind = type(value)
    if kind is tuple or kind is list or isinstance(value, (list, tuple)):
        for each in value:
            if type(each) in PLAIN:
                found.append(each)
            else:
                _gather(each, found)
    elif kind is dict or isinstance(value, dict):
        for each in value.values():
            _gather(each, found)
    else:
        found.append(value)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply `function` to every leaf that is not PLAIN. Named tuples keep their type, torch.Size becomes a tuple."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is tuple:
        return tuple([each if type(each) in PLAIN else map_leaves(function, each) for each in value])
    if kind is list or isinstance(value, list):
        return [each if type(each) in PLAIN else map_leaves(function, each) for each in value]
    if kind is dict or isinstance(value, dict):
        return {name: map_leaves(function, each) for name, each in value.items()} if value else {}
    if isinstance(value, tuple):
        found = [map_leaves(function, each) for each in value]
        return kind(*found) if hasattr(value, "_fields") else tuple(found)
    return function(value)
