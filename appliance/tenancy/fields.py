"""Validators for fields of tenants, keys and members: each returns the valid value or raises InvalidValue naming the field."""

from __future__ import annotations

import enum
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Final

from appliance.base.errors import InvalidValue
from appliance.tenancy.countries import COUNTRIES

NAME_CHARS_MAX = 200
LIMIT_MAX = 10**15
WEIGHT_MAX = 1000
LIST_ITEMS_MAX = 200
MODELS_LIMITED_MAX = 100
ALERT_PERCENTS_MAX = 10
ALERT_PERCENT_MAX = 1000
ADDRESS_CHARS_MAX = 1000
BILLING_FIELDS = ("name", "address", "country", "email", "tax_id", "reference")
"""Fields of the billed party on invoices; `address` may have several lines."""
TIERS = ("interactive", "standard", "batch")
INFERENCE_SCOPE, USAGE_SCOPE = SCOPES = ("inference", "usage")
"""`inference`: run models and list them. `usage`: read the usage of the key's own tenant."""
DEFAULT_SCOPES = (INFERENCE_SCOPE,)
LIMIT_MODES = ("enforce", "shadow")

_REFUSED_CATEGORIES = {"Cc", "Cs", "Zl", "Zp"}  # control characters, lone surrogates, line and paragraph separators
# Bidirectional embeddings, overrides, isolates and their terminators.
_DIRECTION_CONTROLS = frozenset(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))))
_INVISIBLE = frozenset(  # without joiners and direction marks, which some scripts and emoji need
    map(
        chr,
        (
            *(0x00AD, 0x115F, 0x1160, 0x180E, 0x200B, 0x3164, 0xFEFF, 0xFFA0),
            *(*range(0x2060, 0x2065), *range(0xFFF9, 0xFFFC), *range(0xE0000, 0xE0080)),
        ),
    )
)


class Unset(enum.Enum):
    """The type of UNSET."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET
"""Marks a field that a change leaves as it is; None is a value of its own."""


def check_name(value: object, param: str = "name", chars_max: int = NAME_CHARS_MAX) -> str:
    """Return `value` stripped: 1..`chars_max` characters, no control, invisible or bidirectional control characters."""
    name = check_line(value, param, chars_max)
    if not _DIRECTION_CONTROLS.isdisjoint(name):
        raise InvalidValue(f"{param} must not contain bidirectional control characters", param=param)
    if not _INVISIBLE.isdisjoint(name):
        raise InvalidValue(f"{param} must not contain invisible characters", param=param)
    return name


def lookalike_form(name: str) -> str:
    """Return a form in which lookalike names are equal: case-folded, NFKC, without format characters."""
    if name.isascii():  # 0.06 us instead of 4: a new name is compared with every existing one
        return name.lower()
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    return "".join(character for character in folded if unicodedata.category(character) != "Cf")


def check_line(value: object, param: str, chars_max: int = NAME_CHARS_MAX) -> str:
    """Return `value` stripped: 1..`chars_max` characters, no control characters.

    Less strict than `check_name`, for stored names: older ones may contain bidirectional control characters.
    """
    if not isinstance(value, str):
        raise InvalidValue(f"{param} must be a string", param=param)
    name = value.strip()
    if not 1 <= len(name) <= chars_max:
        raise InvalidValue(f"{param} must have 1 to {chars_max} characters, not {len(name)}", param=param)
    if any(unicodedata.category(character) in _REFUSED_CATEGORIES for character in name):
        raise InvalidValue(f"{param} must not contain control characters", param=param)
    return name


def check_whole(value: object, param: str, low: int, high: int) -> int:
    """Return `value` if it is an integer from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidValue(f"{param} must be a whole number from {low} to {high}", param=param)
    return value


def check_choice(value: object, param: str, choices: Sequence[str]) -> str:
    """Return `value` if it is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidValue(f"{param} must be one of {', '.join(choices)}", param=param)
    return value


def check_names(value: object, param: str) -> tuple[str, ...]:
    """Return a list of names without duplicates, in the given order."""
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) > LIST_ITEMS_MAX:
        raise InvalidValue(f"{param} must be a list of at most {LIST_ITEMS_MAX} names", param=param)
    return tuple(dict.fromkeys(check_name(item, param) for item in value))


def check_flag(value: object, param: str) -> bool:
    """Return `value` if it is a bool."""
    if not isinstance(value, bool):
        raise InvalidValue(f"{param} must be true or false", param=param)
    return value


def check_currency(value: object, param: str = "currency") -> str:
    """Return `value` if it has the form of a currency code: three capital letters."""
    if not isinstance(value, str) or len(value) != 3 or not (value.isascii() and value.isalpha() and value.isupper()):
        raise InvalidValue(f"{param} must be a currency code of three capital letters, like EUR", param=param)
    return value


def check_alert_percents(value: object) -> tuple[int, ...]:
    """Return the percentages of a budget at which alerts are sent, sorted, without duplicates; an empty list: no alerts."""
    name = "alert_percents"
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) > ALERT_PERCENTS_MAX:
        raise InvalidValue(f"{name} must be a list of at most {ALERT_PERCENTS_MAX} percentages", param=name)
    return tuple(sorted({check_whole(item, name, 1, ALERT_PERCENT_MAX) for item in value}))


def check_billing(value: object) -> dict[str, str] | None:
    """Return the billing fields that are not None; None when there are none."""
    if not isinstance(value, Mapping):
        raise InvalidValue("billing must be an object with the fields " + ", ".join(BILLING_FIELDS), param="billing")
    for name in value:
        if name not in BILLING_FIELDS:
            message = f"billing.{name} is not a field; choose from {', '.join(BILLING_FIELDS)}"
            raise InvalidValue(message, param=f"billing.{name}")
    given = {name: value[name] for name in BILLING_FIELDS if value.get(name) is not None}
    checked = {
        name: _check_lines(text) if name == "address" else check_name(text, f"billing.{name}") for name, text in given.items()
    }
    if "country" in checked and checked["country"] not in COUNTRIES:
        raise InvalidValue("billing.country must be a two-letter ISO 3166 code in capitals, like DE", param="billing.country")
    if "email" in checked and not is_email(checked["email"]):
        raise InvalidValue("billing.email must be an e-mail address", param="billing.email")
    return checked or None


def is_email(text: str) -> bool:
    """Return whether `text` has the form local@domain, without spaces or control characters."""
    local, at, domain = text.partition("@")
    return bool(local and at and domain) and "@" not in domain and text.isprintable() and " " not in text


def _check_lines(value: object) -> str:
    """Return a postal address, stripped: lines of 1..200 characters, 1000 in total."""
    param = "billing.address"
    if not isinstance(value, str) or len(value) > ADDRESS_CHARS_MAX:
        raise InvalidValue(f"{param} must be a string of at most {ADDRESS_CHARS_MAX} characters", param=param)
    return "\n".join(check_name(line, param) for line in value.replace("\r\n", "\n").strip().split("\n"))


def check_scopes(value: object) -> tuple[str, ...]:
    """Return the scopes in `value`: at least one, all known."""
    scopes = check_names(value, "scopes")
    if not scopes:
        raise InvalidValue("scopes must name at least one scope", param="scopes")
    for scope in scopes:
        check_choice(scope, "scopes", SCOPES)
    return scopes
