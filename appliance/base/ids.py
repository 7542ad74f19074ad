"""Identifiers: sortable by creation time, unguessable, with a prefix that names the kind of object."""

from __future__ import annotations

import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford base 32: no i, l, o, u
_TIME_CHARS = 10  # 50 bits hold milliseconds until the year 37 000
_RANDOM_CHARS = 16  # 80 bits


def _base32(value: int, chars: int) -> str:
    digits = []
    for _ in range(chars):
        value, remainder = divmod(value, 32)
        digits.append(_ALPHABET[remainder])
    return "".join(reversed(digits))


def is_id(text: str, prefix: str) -> bool:
    """Return whether `text` has the form of `new_id(prefix)`."""
    start, _, rest = text.partition("_")
    return start == prefix and len(rest) == _TIME_CHARS + _RANDOM_CHARS and set(rest) <= set(_ALPHABET)


def new_id(prefix: str) -> str:
    """Return `prefix_` + 26 characters: 50 bits of milliseconds and 80 random bits (the layout of a ULID, lower case)."""
    milliseconds = time.time_ns() // 1_000_000
    return f"{prefix}_{_base32(milliseconds, _TIME_CHARS)}{_base32(secrets.randbits(80), _RANDOM_CHARS)}"
