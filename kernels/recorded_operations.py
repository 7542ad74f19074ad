"""The protocol of recorded operations, which later run together in one call: `kernels.simd.launching` implements it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class NotRecordable(Exception):
    """Something between the operations is computed in another way, and would be missing."""


class RecordedOperations(Protocol):
    """Operations over up to `max_rows` rows, one after the other, on tensors that stay where they are."""

    max_rows: int

    def recording(self) -> AbstractContextManager[None]:
        """What is called meanwhile, with tensors of `max_rows` rows, is put down and not run. Raises `NotRecordable`."""
        ...

    def beside(self, max_rows: int) -> RecordedOperations:
        """Room for other operations in the places of these: what the ones leave is gone when the others have run."""
        ...

    def turn(self) -> None:
        """Tensors made from here on take the places of those that were made between the two turns before this one: only what
        was made since the last turn, or before the first one, may still be read."""
        ...

    def run(self, num_rows: int) -> None:
        """Run all of them, over the first `num_rows` rows."""
        ...
