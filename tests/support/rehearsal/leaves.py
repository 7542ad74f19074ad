"""Values in lists, tuples and dictionaries, as operations take them; `torch.utils._pytree` knows more kinds and is slower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def leaves_of(value: Any) -> list[Any]:
    """All values, in order."""
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in leaves_of(each)]
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in leaves_of(each)]
    return [value]


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The same with every value replaced. Named tuples stay what they are, sizes become tuples."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(function, each) for each in value))
    if isinstance(value, list | tuple):
        found = (mapped(function, each) for each in value)
        return list(found) if isinstance(value, list) else tuple(found)
    if isinstance(value, dict):
        return {name: mapped(function, each) for name, each in value.items()}
    return function(value)
