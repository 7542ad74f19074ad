"""Values in lists, tuples and dictionaries, as operations take them; `torch.utils._pytree` knows more kinds and is slower.

A rehearsal takes a good part of its time here: what is of one of Python's own three kinds is known by that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

PLAIN = {int, float, bool, str, slice, type(None), torch.dtype, torch.layout, torch.memory_format}
"""No operation on a rehearsed card makes anything else of these: no function is asked about them."""


def leaves_of(value: Any) -> list[Any]:
    """All values, in order."""
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
    """The same with every value replaced that is not plain. Named tuples stay what they are, sizes become tuples."""
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
