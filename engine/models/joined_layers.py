"""The layers of a decoder as one call, for steps of one token per request.

Where a device's table has `sequence`, the operations of all layers are put down once, over tensors that stay where they are:
inputs are copied to them, and hidden states from them. The layers are not asked again, so that a step costs the host
the copies and one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from engine.layers.batch_inputs import BatchInputs
from kernels import ops

MAX_ROWS = 64
"""What more rows compute takes so long that the calls do not matter."""

Through = Callable[[torch.Tensor, BatchInputs, Sequence[torch.Tensor], Callable[[], None]], torch.Tensor]
"""The way through all layers: embedded rows [T, hidden], inputs, caches, and what to call before each layer → [T, hidden]"""


def are_recordable(
    shapes: Sequence[ops.AttentionShape], *, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether decodes of these attentions are put down at all: operations of the device can be, and attention reads pages of a
    cache in `kv_dtype`. A layer with an operation of torch still cannot."""
    table = ops.operations(device, dtype)
    return table.sequence is not None and all(table.supports_paged(shape, kv_dtype) for shape in shapes)


class JoinedLayers:
    """Recorded for the shapes of `inputs` and for these caches."""

    def __init__(
        self,
        record: ops.RecordedOperations,
        through: Through,
        hidden_size: int,
        inputs: BatchInputs,
        kv_caches: Sequence[torch.Tensor],
    ) -> None:
        """Raises `NotRecordable`."""
        self.kv_caches = kv_caches
        self._record = record
        self._residual = torch.empty(record.max_rows, hidden_size)
        self._inputs = _room(inputs, record.max_rows, len(kv_caches[0]))
        with record.recording():
            self._hidden = through(self._residual, self._inputs, kv_caches, record.next_layer)

    def __call__(self, residual: torch.Tensor, inputs: BatchInputs) -> torch.Tensor:
        """residual: [T, hidden], as it was embedded → [T, hidden], good until the next call"""
        num_rows, room = len(residual), self._inputs
        self._residual[:num_rows] = residual
        room.slot_mapping[:num_rows] = inputs.slot_mapping
        for kept, rotation in zip(room.rotations, inputs.rotations, strict=True):
            kept[0][:num_rows], kept[1][:num_rows] = rotation
        for kept_plan, plan in zip(room.attention, inputs.attention, strict=True):
            assert isinstance(kept_plan, ops.PagedPlan)
            assert isinstance(plan, ops.PagedPlan)
            kept_plan.context_lens[:num_rows] = plan.context_lens
            kept_plan.block_tables[:num_rows, : plan.block_tables.shape[1]] = plan.block_tables
        self._record.run(num_rows)
        return self._hidden[:num_rows]


def one_token_each(inputs: BatchInputs) -> bool:
    """Whether the rows of a step are decodes that attend over pages."""
    return all(isinstance(plan, ops.PagedPlan) and plan.query_starts is None for plan in inputs.attention)


def _room(inputs: BatchInputs, num_rows: int, num_blocks: int) -> BatchInputs:
    """Tensors like those of `inputs` for `num_rows` rows with tables of any width; what is not written takes no memory."""
    plans = [
        replace(
            plan,
            num_decodes=num_rows,
            block_tables=torch.empty(num_rows, num_blocks, dtype=torch.int32),
            context_lens=torch.empty(num_rows, dtype=torch.int32),
        )
        for plan in inputs.attention
        if isinstance(plan, ops.PagedPlan)
    ]
    return BatchInputs(
        token_ids=torch.empty(0, dtype=torch.int64),
        positions=torch.empty(0, dtype=torch.int64),
        rotations=tuple((_rows_like(cos, num_rows), _rows_like(sin, num_rows)) for cos, sin in inputs.rotations),
        slot_mapping=torch.empty(num_rows, dtype=torch.int64),
        sampled_rows=None,
        attention=tuple(plans),
    )


def _rows_like(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    return torch.empty(num_rows, *rows.shape[1:])
