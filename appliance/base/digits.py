"""Strict parsing of whole numbers: `int` would also accept signs, spaces, underscores and digits of any script."""

from __future__ import annotations


def whole_number(text: str, maximum: int) -> int | None:
    """Return the number in `text` if it consists of ASCII digits and is from 0 to `maximum`, else None."""
    if not (text.isascii() and text.isdigit()) or len(text) > len(str(maximum)):
        return None
    number = int(text)
    return number if number <= maximum else None
