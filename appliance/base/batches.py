"""Split a sequence into batches, for limits on the values in a statement and the work in a transaction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def batched(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield `items` in their order, `size` at a time; the last batch may be shorter."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
