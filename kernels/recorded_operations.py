"""The protocol of recorded operations, which later run together in one call: `kernels.simd.launching` implements it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class NotRecordable(Exception):
    """Raised for a computation that is not an operation and would be missing from the record."""


class RecordedOperations(Protocol):
    """Operations over up to `max_rows` rows, one after the other, on tensors at fixed addresses."""

    max_rows: int

    def recording(self) -> AbstractContextManager[None]:
        """Record, but do not run, the operations called in this context with tensors of `max_rows` rows. Raises
        `NotRecordable`."""
        ...

    def sharing_buffers(self, max_rows: int) -> RecordedOperations:
        """A record of other operations in the same buffers: running one record overwrites the results of the other."""
        ...

    def next_layer(self) -> None:
        """Begin a layer. Its tensors overwrite those of the layer before the last one: it may read results of the last layer,
        and what was computed before the first layer."""
        ...

    def run(self, num_rows: int) -> None:
        """Run all operations, over the first `num_rows` rows."""
        ...
