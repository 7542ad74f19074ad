"""Who has left between two ordered lists, most of which are alike. Compares by identity.

before   a b c d e         gone are rows 1 and 3
after    a c e f           the front of it are those who stayed, in their order; f has come
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, count
from operator import is_not
from typing import Any, TypeVar

Each = TypeVar("Each")


def departures(before: Sequence[Any], after: Sequence[Any]) -> list[int]:
    """The rows of `before`, in ascending order, without which it is the front of `after`. Whoever stands elsewhere in `after`
    has left and come again. Walks once through the lists, at the speed of C, and takes a step for each row."""
    gone: list[int] = []
    row = 0
    while row < len(before):
        others = after[row - len(gone) :]
        first = next(compress(count(row), map(is_not, before[row:], others)), None)
        if first is None:
            gone += range(row + len(others), len(before))
            break
        gone.append(first)
        row = first + 1
    return gone


def without(column: Sequence[Each], rows: Sequence[int]) -> list[Each]:
    """A copy of a column without these rows, which ascend."""
    kept = [*column]
    for row in reversed(rows):
        del kept[row]
    return kept
