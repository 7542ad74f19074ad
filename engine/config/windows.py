"""Which layers see only the last tokens, from config.json. Knows no torch.

A window counts the tokens that a query sees, itself included; None is unlimited.
"""

from __future__ import annotations

from engine.config.families import Family, Windows
from engine.config.values import JsonObject, flag, positive
from engine.errors import UnsupportedModel
from engine.number_checks import is_integer

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_windows(config: JsonObject, family: Family, num_layers: int) -> list[int | None]:
    """The window of each layer. Raises `UnsupportedModel`, naming the key."""
    window = _window(config, family)
    types = _layer_types(config, num_layers)
    if family.windows in (Windows.SWITCHED, Windows.PATTERN):
        types = types or _default_layer_types(config, family, window, num_layers)
        if window is None and SLIDING in types:
            raise UnsupportedModel(f"a layer is of type {SLIDING}, but sliding_window is not set")
        return [window if kind == SLIDING else None for kind in types]
    if types and set(types) != {FULL if window is None else SLIDING}:
        raise UnsupportedModel(f"layer_types with other than one kind of layer is not supported for {family.architecture}")
    return [window] * num_layers


def _window(config: JsonObject, family: Family) -> int | None:
    if family.windows is Windows.NONE:
        return None
    if family.windows in (Windows.SWITCHED, Windows.SWITCHED_EVERY) and not flag(config, "use_sliding_window"):
        return None
    if config.get("sliding_window", family.window) is None:
        return None
    return positive(config, "sliding_window", default=family.window)


def _layer_types(config: JsonObject, num_layers: int) -> list[str]:
    types = config.get("layer_types")
    if types is None:
        return []
    if not isinstance(types, list) or len(types) != num_layers:
        raise UnsupportedModel(f"layer_types must be a list of {num_layers} entries, one per layer")
    unknown = sorted({str(kind) for kind in types} - {FULL, SLIDING})
    if unknown:
        raise UnsupportedModel(f"layer_types {', '.join(unknown)} is not supported; supported: {FULL}, {SLIDING}")
    return types


def _default_layer_types(config: JsonObject, family: Family, window: int | None, num_layers: int) -> list[str]:
    if family.windows is Windows.SWITCHED:
        first = _first_window_layer(config)
        return [SLIDING if window is not None and index >= first else FULL for index in range(num_layers)]
    pattern = family.window_pattern
    if family.reads_window_pattern:
        pattern = positive(config, "sliding_window_pattern", default=pattern)
    return [FULL if (index + 1) % pattern == 0 else SLIDING for index in range(num_layers)]


def _first_window_layer(config: JsonObject) -> int:
    first = config.get("max_window_layers", 28)
    if not is_integer(first) or first < 0:
        raise UnsupportedModel(f"config.json: max_window_layers must be an integer from 0 on, not {first!r}")
    return first
