"""Which rows were removed between two ordered lists that are mostly the same. Compares by identity.

before   a b c d e         rows 1 and 3 are removed
after    a c e f           begins with the elements of `before` that remain, in their order; f is new
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, count
from operator import is_not
from typing import Any, TypeVar

Item = TypeVar("Item")


def removed_rows(before: Sequence[Any], after: Sequence[Any]) -> list[int]:
    """The rows of `before`, in ascending order, to remove so that the rest is the start of `after`. An element that is
    elsewhere in `after` counts as removed. One pass over the lists at the speed of C, and one Python step per removed row."""
    removed: list[int] = []
    row = 0
    while row < len(before):
        others = after[row - len(removed) :]
        first = next(compress(count(row), map(is_not, before[row:], others)), None)
        if first is None:
            removed += range(row + len(others), len(before))
            break
        removed.append(first)
        row = first + 1
    return removed


def without_rows(column: Sequence[Item], rows: Sequence[int]) -> list[Item]:
    """A copy of a column without these rows, which are in ascending order."""
    kept = [*column]
    for row in reversed(rows):
        del kept[row]
    return kept
