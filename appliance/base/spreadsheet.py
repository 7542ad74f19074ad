"""Text in a CSV file that no spreadsheet takes for a formula."""

from __future__ import annotations

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")  # OWASP, CSV injection


def plain_text(text: str) -> str:
    """Return `text`, with an apostrophe in front where a spreadsheet would take it for a formula."""
    return f"'{text}" if text.startswith(FORMULA_STARTS) else text
