"""The protocol of recorded operations, which later run together in one call: `kernels.simd.launching` implements it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class NotRecordable(Exception):
    """Raised for a computation that is no operation and would be missing from the record."""


class RecordedOperations(Protocol):
    """Operations over up to `max_rows` rows, one after the other, on tensors that stay where they are."""

    max_rows: int

    def recording(self) -> AbstractContextManager[None]:
        """Record the operations called in this context, with tensors of `max_rows` rows, unrun. Raises `NotRecordable`."""
        ...

    def sharing_buffers(self, max_rows: int) -> RecordedOperations:
        """A record of other operations in the same buffers: results of the ones are overwritten when the others run."""
        ...

    def next_layer(self) -> None:
        """Begin a layer, whose tensors overwrite those of the layer before the last one: it may read what the last layer made,
        and what was made before the first one."""
        ...

    def run(self, num_rows: int) -> None:
        """Run all operations, over the first `num_rows` rows."""
        ...
