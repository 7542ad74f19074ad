"""The inputs of a decode step's rows: buffers at fixed addresses, shared by all models that compute the step.

Usually the device fills them from the slots. In steps that verify drafts the host does, because it knows how far each request
is. In such a step the rows of a request are attended in groups, where the kernels can do that: a group reads the blocks of its
request once.

    slot     4  4  4  4  4  7  -          rows: of two requests, one of them with four draft tokens, and padding
    context 31 32 33 34 35 12  0
    group   └───── 34 ┘ 35 12  0          of at most four rows, each with the context of its last one
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from engine.layers.forward_inputs import ForwardInputs
from engine.runner.paged_decoder import PagedDecoder
from engine.runner.scheduled_rows import group_rows
from engine.runner.slots import NOTHING, Int64Array, SlotState
from engine.runner.staging import Staging
from kernels import ops

PADDING = (NOTHING, 0, 0, NOTHING, 0)
"""Slot, token, position, slot mapping and context length of a row that changes nothing."""


class DecodeInputBuffers:
    """The inputs of up to `max_rows` rows. A row with a negative slot is padding: it reads no context and writes no key."""

    def __init__(self, state: SlotState, decoder: PagedDecoder, *, max_rows: int, block_size: int) -> None:
        """`decoder`: the model whose kernels decide how many rows are attended together."""
        max_blocks, device = state.tables.shape[1], state.tables.device
        self.slots = torch.full((max_rows,), NOTHING, dtype=torch.int32, device=device)  # the slot of each
        self.token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.slot_mapping = torch.full((max_rows,), NOTHING, dtype=torch.int64, device=device)
        self.context_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)  # of rows, or of groups
        self._group_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._group_starts = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)  # among the rows
        self._max_verify_group = decoder.max_verify_group
        # What `write_slots` wrote last, while it is in `slots`, and its size.
        self._last_written: tuple[Sequence[int] | Int64Array, int] = ((), 0)
        self._state = state
        self._block_size = block_size
        self._staging = Staging(device)
        self._ops = ops.operations(device, decoder.dtype)

    @property
    def max_rows(self) -> int:
        return self.slots.shape[0]

    def write_slots(self, slots: Sequence[int] | Int64Array, size: int) -> None:
        """Send the slots of the first `size` rows, padded after the last of `slots`; `fill_from_slots` derives the other
        inputs from them. Nothing is sent if `slots` is the same object and `size` the same as in the last call, and no
        `write_columns` came between."""
        written, written_size = self._last_written
        if slots is not written or size != written_size:
            padded = np.full(size, NOTHING, dtype=np.int32)
            padded[: len(slots)] = slots
            self._staging.send(padded, into=self.slots[:size])
            self._last_written = slots, size

    def write_columns(self, columns: Sequence[Sequence[int]], size: int) -> None:
        """columns: slots, tokens, positions, slot mapping and context lengths of up to `size` rows; the rest is padding"""
        self._last_written = (), 0
        num_padded = size - len(columns[0])
        padded = [[*column, *[value] * num_padded] for column, value in zip(columns, PADDING, strict=True)]
        inputs = [self.slots, self.token_ids, self.positions, self.slot_mapping, self.context_lens]
        table_slots = padded[0]
        if self._max_verify_group > 1:
            table_slots, *groups = group_rows(padded[0], padded[-1], self._max_verify_group)
            padded += groups
            inputs += [self._group_lens, self._group_starts[1:]]
        table = np.array([table_slots, *padded])
        host_tables = self._state.host_tables
        if host_tables is not None:
            for target, values in zip(inputs, table[1:], strict=True):
                target.numpy()[:size] = values
            self.block_tables.numpy()[:size] = host_tables[table[0]]
            return
        sent = self._staging.send(table)
        for target, column in zip(inputs, sent[1:], strict=True):
            target[:size].copy_(column)
        self.block_tables[:size].copy_(self._state.tables.index_select(0, sent[0].clamp_min(0)))

    def put_tokens(self, rows: Sequence[int], token_ids: torch.Tensor) -> None:
        """Overwrite the tokens of `rows` with tokens known only on the device: [len(rows)] int64"""
        self.token_ids.index_copy_(0, self._staging.send(rows), token_ids)

    def fill_from_slots(self, size: int) -> None:
        """Compute the inputs of the first `size` rows on the device, from their slots."""
        self._ops.prepare_decode(
            self.slots[:size],
            self._state.last_tokens,
            self._state.num_tokens,
            self._state.tables,
            block_size=self._block_size,
            token_ids=self.token_ids[:size],
            positions=self.positions[:size],
            slot_mapping=self.slot_mapping[:size],
            context_lens=self.context_lens[:size],
            block_tables=self.block_tables[:size],
        )

    def forward_inputs(self, decoder: PagedDecoder, size: int, *, has_drafts: bool) -> ForwardInputs:
        """The first `size` rows for one of the models. `has_drafts`: as `write_columns` has left them."""
        plan = partial(ops.PagedPlan, block_tables=self.block_tables[:size])
        if has_drafts and self._max_verify_group > 1:
            groups = {"query_starts": self._group_starts[: size + 1], "context_lens": self._group_lens[:size]}
            plan = partial(plan, num_decodes=0, max_query_len=self._max_verify_group, **groups)
        else:
            plan = partial(plan, num_decodes=size, context_lens=self.context_lens[:size], is_newest=not has_drafts)
        return decoder.device_inputs(self.token_ids[:size], self.positions[:size], self.slot_mapping[:size], plan)
