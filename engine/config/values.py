"""Single values of config.json, checked by type and range, with errors that name the key. Knows no torch and no model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.errors import UnsupportedModel
from engine.number_checks import is_integer, is_number

JsonObject = Mapping[str, Any]

INTEGER_MAX = 2**31 - 1
NUMBER_MAX = 1e30
"""Larger than any number of a model, and small enough that products of several numbers are finite."""


def positive(config: JsonObject, key: str, *, default: int | None = None, at_most: int = INTEGER_MAX) -> int:
    """A positive integer; `default` where the key is missing or null. Raises `UnsupportedModel`."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not is_integer(value) or value < 1:
        raise UnsupportedModel(f"config.json: {key} must be a positive integer, not {value!r}")
    if value > at_most:
        raise UnsupportedModel(f"config.json: {key} must be at most {at_most}, not {value}")
    return value


def number(config: JsonObject, key: str, default: float | None = None) -> float:
    """A positive number, at most NUMBER_MAX; `default` where the key is missing or null. Raises `UnsupportedModel`."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not is_number(value) or not 0 < value < math.inf:
        raise UnsupportedModel(f"config.json: {key} must be a positive number, not {value!r}")
    if value > NUMBER_MAX:
        raise UnsupportedModel(f"config.json: {key} must be at most {NUMBER_MAX:g}")
    return float(value)


def flag(config: JsonObject, key: str, *, default: bool = False, file: str = "config.json") -> bool:
    """True or false; `default` where the key is missing or null. Raises `UnsupportedModel`, naming `file` and the key."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UnsupportedModel(f"{file}: {key} must be true or false, not {value!r}")
    return value


def mapping(config: JsonObject, key: str) -> JsonObject:
    """A JSON object; empty where the key is missing or null. Raises `UnsupportedModel`."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UnsupportedModel(f"config.json: {key} must be an object, not {value!r}")
    return value


def integers(config: JsonObject, key: str) -> tuple[int, ...]:
    """A list of integers, or one of them alone; empty where the key is missing or null. Raises `UnsupportedModel`."""
    value = config.get(key)
    if value is None:
        return ()
    listed = value if isinstance(value, list) else [value]
    if not all(map(is_integer, listed)):
        raise UnsupportedModel(f"config.json: {key} must be an integer or a list of them, not {value!r}")
    return tuple(listed)
