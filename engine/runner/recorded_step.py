"""Whole decode steps as one recorded call, where a device's operations can be recorded: for CPUs what CUDA graphs are for GPUs.

A step is called once with tensors of the largest number of rows, and each of its operations is recorded instead of run. Buffers
keep their addresses, so that later calls pass nothing but their number of rows. There is a record for each kind of step; all
use the same memory. A step that contains an operation of torch cannot be recorded, and is computed operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from engine.sampling.columns import Kind
from engine.step_sizes import RECORDED_ROWS_MAX
from kernels import ops

Computed = torch.Tensor | None
"""Logits of a step that ends with them: [R, V]. None of one that chooses its tokens."""

Compute = Callable[[int, Kind | None, bool, Callable[[], None] | None], Computed]
"""A step of so many rows, of this kind, and with drafts or not; the last is called before each layer while it is recorded."""


class Record(NamedTuple):
    """What runs a step, and where its logits are then."""

    operations: ops.RecordedOperations
    logits: Computed


class RecordedSteps:
    """Steps of up to `max_rows` rows that were recorded, or that cannot be."""

    def __init__(self, new_record: Callable[[int], ops.RecordedOperations] | None, compute: Compute, max_rows: int) -> None:
        """`new_record` begins a record of so many rows; None where steps are not recorded."""
        self._new_record = new_record
        self._compute = compute
        self._max_rows = min(max_rows, RECORDED_ROWS_MAX)
        self._records: dict[tuple[Kind | None, bool], Record | None] = {}

    def record(self, kind: Kind | None, *, has_drafts: bool = False) -> Record | None:
        """The record of steps of this kind, made at the first call; None if they cannot be recorded."""
        if self._new_record is None:
            return None
        key = kind, has_drafts
        if key not in self._records:
            operations = self._new_record(self._max_rows)
            try:
                with operations.recording():
                    logits = self._compute(self._max_rows, kind, has_drafts, operations.next_layer)
                self._records[key] = Record(operations, logits)
            except ops.NotRecordable:
                self._records[key] = None
        return self._records[key]

    def __call__(self, num_rows: int, kind: Kind | None, *, has_drafts: bool = False) -> Computed:
        """Compute a step, by its record if there is one."""
        record = self.record(kind, has_drafts=has_drafts) if num_rows <= self._max_rows else None
        if record is None:
            return self._compute(num_rows, kind, has_drafts, None)
        record.operations.run(num_rows)
        return None if record.logits is None else record.logits[:num_rows]
