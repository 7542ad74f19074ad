"""Protection of CSV cells against formula injection, for every separator that spreadsheets use."""

from __future__ import annotations

import re

# OWASP, CSV injection; with the full-width forms of East Asia.
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "＝", "＋", "－", "＠")
# In many locales cells are separated by semicolons, and a quoted cell loses its quotes.
_FORMULA_CELL = re.compile(f'(^|[;\t\r\n])(?="*[{re.escape("".join(FORMULA_STARTS))}])')


def escape_formulas(text: str) -> str:
    """Return `text` with an apostrophe before everything that a spreadsheet could read as a cell with a formula."""
    return _FORMULA_CELL.sub(r"\1'", text)
