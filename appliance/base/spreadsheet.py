"""Text in a CSV file that no spreadsheet takes for a formula, in whichever language it reads the file."""

from __future__ import annotations

import re

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "＝", "＋", "－", "＠")  # OWASP, CSV injection; full width for East Asia
# Many countries divide cells at semicolons, and what is quoted there is a cell without its quotes.
_BEGINS = re.compile(f'(^|[;\t\r\n])(?="*[{re.escape("".join(FORMULA_STARTS))}])')


def plain_text(text: str) -> str:
    """Return `text`, with an apostrophe wherever a cell would begin that a spreadsheet takes for a formula."""
    return _BEGINS.sub(r"\1'", text)
