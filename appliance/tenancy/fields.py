"""What tenants, keys and members may be called and limited to: checks that return the value or raise InvalidValue naming it."""

from __future__ import annotations

import enum
import unicodedata
from collections.abc import Sequence
from typing import Final, TypeVar

from appliance.base.errors import InvalidValue

NAME_CHARS_MAX = 200
LIMIT_MAX = 10**15
WEIGHT_MAX = 1000
LIST_ITEMS_MAX = 200
TIERS = ("interactive", "standard", "batch")
SCOPES = ("inference",)

_REFUSED_CATEGORIES = {"Cc", "Cs", "Zl", "Zp"}  # controls, halves of surrogate pairs, line and paragraph separators


class Unset(enum.Enum):
    """The type of UNSET."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET
"""Stands in a change for a field that is left as it is; None would be a value."""

T = TypeVar("T")


def pick(change: T | Unset, current: T) -> T:
    """Return the changed value, or `current` when the change leaves it alone."""
    return current if isinstance(change, Unset) else change


def check_name(value: object, param: str = "name") -> str:
    """Return `value` without surrounding space: 1..200 characters, none of them a control character."""
    if not isinstance(value, str):
        raise InvalidValue(f"{param} must be a text", param=param)
    name = value.strip()
    if not 1 <= len(name) <= NAME_CHARS_MAX:
        raise InvalidValue(f"{param} must have 1 to {NAME_CHARS_MAX} characters, not {len(name)}", param=param)
    if any(unicodedata.category(character) in _REFUSED_CATEGORIES for character in name):
        raise InvalidValue(f"{param} must not contain control characters", param=param)
    return name


def check_whole(value: object, param: str, low: int, high: int) -> int:
    """Return `value`, a whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidValue(f"{param} must be a whole number from {low} to {high}", param=param)
    return value


def check_choice(value: object, param: str, choices: Sequence[str]) -> str:
    """Return `value`, one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidValue(f"{param} must be one of {', '.join(choices)}", param=param)
    return value


def check_names(value: object, param: str) -> tuple[str, ...]:
    """Return `value`, a list of names, each once, in the order given."""
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) > LIST_ITEMS_MAX:
        raise InvalidValue(f"{param} must be a list of at most {LIST_ITEMS_MAX} names", param=param)
    return tuple(dict.fromkeys(check_name(item, param) for item in value))


def check_scopes(value: object) -> tuple[str, ...]:
    """Return `value`, at least one known scope."""
    scopes = check_names(value, "scopes")
    if not scopes:
        raise InvalidValue("scopes must name at least one scope", param="scopes")
    for scope in scopes:
        check_choice(scope, "scopes", SCOPES)
    return scopes
