"""One decode step from slots to tokens as a function of buffers that stay where they are: what a graph captures.

    slots ─► inputs (last tokens, positions, places, blocks) ─► layers ─► logits ─► tokens ─► slots, and out

It takes its rows from `rows`, where the host writes the slots of the step, and leaves their tokens in `sampled`. A row below 0
is padding: it reads no context, writes no key, and changes no slot, so a step of nothing but padding changes nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch

from engine.runner.batch_inputs import BatchInputs
from engine.runner.paged_decoder import PagedDecoder
from engine.runner.slot_sampler import SlotSampler
from engine.runner.slots import NOTHING, SlotState
from kernels import ops

EVERY = 8


def step_sizes(max_rows: int) -> Iterator[int]:
    """Numbers of rows that steps are rounded up to: 1, 2, 4, every eighth, and the largest."""
    yield from (size for size in (1, 2, 4) if size < max_rows)
    yield from range(EVERY, max_rows, EVERY)
    yield max_rows


def step_size(num_rows: int, max_rows: int) -> int:
    """The smallest of these that holds `num_rows`."""
    rounded = -(-num_rows // EVERY) * EVERY if num_rows > 4 else 4 if num_rows > 2 else num_rows
    return min(rounded, max_rows)


class DecodeStep:
    """The step of one model for up to as many rows as there are slots."""

    def __init__(
        self, decoder: PagedDecoder, state: SlotState, sampler: SlotSampler, *, block_size: int, device: torch.device
    ) -> None:
        num_rows, num_columns = state.tables.shape
        self.rows = torch.full((num_rows,), NOTHING, dtype=torch.int32, device=device)
        self.sampled = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._token_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._slot_mapping = torch.full((num_rows,), NOTHING, dtype=torch.int64, device=device)
        self._context_lens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros(num_rows, num_columns, dtype=torch.int32, device=device)
        self._decoder = decoder
        self._state = state
        self._sampler = sampler
        self._block_size = block_size
        self._ops = ops.operations(device)
        cache = decoder.kv_caches[0]
        self._workspaces = [
            self._ops.decode_workspace(shape, num_rows, num_columns, cache.dtype, device) for shape in decoder.attention_shapes
        ]

    def __call__(self, size: int, kind: Hashable) -> None:
        """Compute the first `size` of `rows`. Makes no decision by anything that lies on the device."""
        rows, context_lens = self.rows[:size], self._context_lens[:size]
        self._ops.prepare_decode(
            rows,
            self._state.last_tokens,
            self._state.num_tokens,
            self._state.tables,
            block_size=self._block_size,
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            slot_mapping=self._slot_mapping[:size],
            context_lens=context_lens,
            block_tables=self._block_tables[:size],
        )
        logits = self._decoder.logits(self._decoder.forward(self._inputs(size)), wide=False)
        sampled = self._sampler.choose(logits, rows, context_lens, kind)
        self._state.advance(rows, sampled, out=self.sampled[:size])

    def _inputs(self, size: int) -> BatchInputs:
        positions, tables, lens = self._positions[:size], self._block_tables[:size], self._context_lens[:size]
        return BatchInputs(
            token_ids=self._token_ids[:size],
            positions=positions,
            rotations=tuple(rotary.at(positions) for rotary in self._decoder.rotaries),
            slot_mapping=self._slot_mapping[:size],
            sampled_rows=None,
            attention=tuple(
                ops.PagedPlan(shape, size, tables, lens, workspace=workspace)
                for shape, workspace in zip(self._decoder.attention_shapes, self._workspaces, strict=True)
            ),
        )
