"""Checks of single keys of `quantization_config`, with errors that name the key and the supported values. Knows no torch."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config.values import JsonObject
from engine.errors import UnsupportedModel

KEY = "quantization_config"
GROUP_SIZES = (32, 64, 128, 256, 512, 1024)


def refusal(key: str, value: object, supported: str) -> UnsupportedModel:
    """The error for a value of `quantization_config` that is not supported."""
    return UnsupportedModel(f"config.json: {KEY}.{key} {value!r} is not supported; supported: {supported}")


def require_one_of(settings: JsonObject, key: str, *accepted: object, prefix: str = "") -> None:
    """Raise `UnsupportedModel` for a value that is none of `accepted`; a missing key and null are `None`."""
    value = settings.get(key)
    if not any(value == known and type(value) is type(known) for known in accepted):
        raise refusal(f"{prefix}{key}", value, ", ".join(map(_in_json, accepted)))


def require_values(settings: JsonObject, prefix: str, **accepted: Sequence[object]) -> None:
    """As `require_one_of`, for several keys."""
    for key, values in accepted.items():
        require_one_of(settings, key, *values, prefix=prefix)


def _in_json(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def group_size(settings: JsonObject, *, prefix: str = "") -> int | None:
    """Inputs that share a scale; None is all of them, written as -1. Raises `UnsupportedModel`."""
    size = settings.get("group_size")
    if size == -1:
        return None
    if size not in GROUP_SIZES:
        raise refusal(f"{prefix}group_size", size, f"{', '.join(map(str, GROUP_SIZES))} or -1")
    return int(size)
