"""Whole numbers in text from outside, where `int` would also take signs, spaces, underscores and digits of any script."""

from __future__ import annotations


def whole_number(text: str, most: int) -> int | None:
    """Return the number that `text` writes in ASCII digits, None unless it is one from 0 to `most`."""
    if not (text.isascii() and text.isdigit()) or len(text) > len(str(most)):
        return None
    number = int(text)
    return number if number <= most else None
